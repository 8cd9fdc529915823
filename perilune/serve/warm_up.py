"""Before the first request: what is compiled, recorded or loaded at its first use is used once, so that nobody waits for it.

And afterwards: whoever runs a server can see in its metrics, and in its log, what was missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from perilune.serve.core import EngineCore
from perilune.serve.request import SamplingParams
from perilune.serve.runner.preparations import preparations
from perilune.serve.sampling import SamplingRow, start_draw, token_logprobs

TELL_EVERY = 3.0  # seconds

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with the number of pieces that are done, how many there are, and what the next one is for."""

_DRAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_p=0.9, logprobs=5),
    SamplingParams(seed=0, top_k=20, min_p=0.01, min_tokens=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.3, logprobs=0),
    SamplingParams(seed=0, presence_penalty=0.5, logit_bias=((1, 1.0),), ignore_eos=True),
)


class FirstUses:
    """What was compiled, loaded or recorded since the warm-up ended.

    Attributes:
        count, seconds: of these; before the warm-up has ended, or without one, of everything.
        warmed: whether a warm-up has ended: from then on each one is a warning.
    """

    def __init__(self) -> None:
        self.count, self.seconds, self.warmed = 0, 0.0, False
        self._lock = threading.Lock()

    def __call__(self, what: str, seconds: float) -> None:
        """See `ops.first_use`."""
        with self._lock:
            self.count += 1
            self.seconds += seconds
        if self.warmed:
            log.warning("%s while requests may be waiting: %.0f ms", what, 1e3 * seconds)
        else:
            log.debug("%s: %.0f ms", what, 1e3 * seconds)

    def begin(self) -> None:
        """The warm-up has ended."""
        with self._lock:
            self.count, self.seconds, self.warmed = 0, 0.0, True


def warm_up(core: EngineCore, vocabulary: int, progress: Progress | None = None, *, rare: bool = True) -> float:
    """Use everything once; returns the seconds it took. Between two pieces the engine answers whoever has come already.

    Args:
        core: the engine.
        vocabulary: ids that can be drawn.
        progress: see `Progress`; None = a line in the log now and then.
        rare: see `preparations`.

    Raises:
        EngineClosed: the engine was closed meanwhile.
    """
    began = told = time.monotonic()
    runner = core.runner
    device = runner.model.device
    pieces = [
        *preparations(runner, rare=rare),
        ("drawing", lambda: try_draws(vocabulary, runner.model.compute_dtype, device)),
    ]
    if core.tiers is not None and runner.launches:
        pieces += core.tiers.preparations(runner.longest)
    memory = core.call(lambda: _reserved(device)) if runner.launches else 0
    for number, (what, run) in enumerate(pieces):
        if progress is not None:
            progress(number, len(pieces), what)
        elif time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            log.info("warming up: %d of %d, %s", number, len(pieces), what)
        core.call(run)
    if runner.launches:
        memory = core.call(lambda: _reserved(device)) - memory
    seconds = time.monotonic() - began
    if progress is not None:
        progress(len(pieces), len(pieces), "done")
    elif runner.launches:
        log.info("warmed up in %.1f s: %d pieces, %d MiB of the device", seconds, len(pieces), memory >> 20)
    return seconds


def _reserved(device: torch.device) -> int:
    """Bytes of the device that cannot be given back, once it has done all that it was asked to."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def try_draws(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Draw in every way, alone and in company, with a grammar's mask and without; and score a prompt."""
    mask = np.ones(vocabulary, dtype=np.bool_)
    few = _DRAWS[:2] if device.type == "cpu" else _DRAWS
    companies = [[one] for one in few] + ([list(few)] if device.type != "cpu" else [])
    for company in companies:
        logits_BZ = torch.zeros(len(company), vocabulary, dtype=dtype, device=device)
        rows = [SamplingRow(params, [0, 1], ends={0}) for params in company]
        for masks in (None, [mask] * len(rows)):
            start_draw(rows, logits_BZ, masks).read()
    token_logprobs(logits_BZ, [0] * len(logits_BZ), [2] * len(logits_BZ))
