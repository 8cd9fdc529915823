"""Scheduler, cache and runner driven by hand, for measurements: no thread, no text, greedy tokens."""

from __future__ import annotations

import itertools
import time
from functools import lru_cache

import torch

from perilune.config.presets import preset
from perilune.model import Transformer, init_weights
from perilune.model.cast import compute_in
from perilune.serve.cache import HybridCache, KnownPrompts, RootKey, TokenChain
from perilune.serve.overlap import pays_off, why_settled_first
from perilune.serve.runner import ModelRunner, PagePool, pool_geometry
from perilune.serve.runner.preparations import preparations
from perilune.serve.schedule import Limits, Plan, Row, Scheduler, Sequence, ServiceClass
from perilune.serve.staging import Readback, Stopwatch

ONE_CLASS = (ServiceClass(name="all", up_to=2**62),)


@lru_cache(maxsize=1)
def model_of(name: str, device: str) -> Transformer:
    """A preset with random weights, in the dtype that its device serves in."""
    with torch.device(device):
        model = init_weights(Transformer(preset(name)), 0, device=device).eval()
    return compute_in(model, torch.bfloat16 if device == "cuda" else torch.float32)


def random_ids(model: Transformer, count: int, seed: int = 0) -> list[int]:
    """A prompt."""
    return torch.randint(0, model.cfg.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pages_of(model: Transformer, tokens: int, sequences: int) -> int:
    """Pages for so many tokens of so many sequences, twice over."""
    geometry = pool_geometry(model.cfg, model.compute_dtype, device=model.device)
    return 2 * geometry.pages_for(tokens) + sequences * (4 * geometry.groups + 2) + 8


class Driver:
    """An engine without its thread.

    Args:
        model: greedy answers are drawn from it.
        pages: of the pool.
        limits: of the scheduler.
        longest: tokens of a sequence, where that matters.
        ahead: a step is launched before the one before it is settled, as the engine does it where it pays off.

    Attributes:
        scores: what the last token drawn by each sequence of the latest step that drew was drawn from, `[Z]`.
        spoke: when each sequence drew its first token, in seconds of `time.perf_counter`.
    """

    def __init__(
        self, model: Transformer, pages: int, limits: Limits, *, longest: int = 1 << 20, ahead: bool = False
    ) -> None:
        self.geometry = pool_geometry(model.cfg, model.compute_dtype, device=model.device)
        self.cache = HybridCache(self.geometry, pages)
        self.ahead = ahead and pays_off(model.device)
        self.scheduler = Scheduler(self.cache, limits, ahead=self.ahead)
        self.pool = PagePool(model.cfg, self.geometry, pages, model.compute_dtype, model.device)
        self.runner = ModelRunner(
            model, self.pool, model.cfg.vocab_size, most_rows=limits.sequences, most_tokens=limits.step_tokens,
            longest=longest,
        )  # fmt: skip
        self.scores: dict[str, torch.Tensor] = {}
        self.spoke: dict[str, float] = {}
        self._launched: tuple[Plan, list[Row], Readback] | None = None
        self._names, self._known = itertools.count(), KnownPrompts()

    def warm_up(self) -> None:
        """As a server does before it is ready."""
        for _, run in preparations(self.runner, rare=False):
            run()

    def chain(self, ids: list[int]) -> TokenChain:
        """Digests of a prompt."""
        return self._known.chain(RootKey(model="m"), self.geometry.unit, ids)

    def add(self, ids: list[int], chain: TokenChain | None = None) -> Sequence:
        """Queue a prompt."""
        sequence = Sequence(f"s{next(self._names)}", ids, chain or self.chain(ids))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        """One step, greedy."""
        plan = self.scheduler.plan()
        assert plan is not None, "nothing can be computed"
        if self.ahead:
            self._launch(plan)
            return
        drawn: dict[str, int] = {}
        for stage in range(len(plan.stages)):
            watch = Stopwatch(self.pool.bytes_PR.device)
            logits = self.runner.run(plan, stage).logits
            watch.stop()
            if logits:
                self.scores = logits
                drawn |= zip(logits, torch.stack(list(logits.values())).argmax(-1).tolist())
            self.scheduler.took(plan, stage, watch.seconds())
            now = time.perf_counter()
            for name in logits:
                self.spoke.setdefault(name, now)
        self.scheduler.finish(plan, drawn)

    def _launch(self, plan: Plan) -> None:
        """Launch a step, then settle the one before it; and this one, where the engine would."""
        scores = self.runner.run(plan)
        ids_N = scores.together().argmax(-1)
        self.runner.keep(scores.rows, ids_N)
        before, self._launched = self._launched, (plan, scores.rows, Readback([ids_N]))
        self._settle(before)
        if why_settled_first(plan, self.scheduler) is not None:
            self._settle(self._launched)
            self._launched = None

    def _settle(self, launched: tuple[Plan, list[Row], Readback] | None) -> None:
        if launched is not None:
            plan, rows, drawn = launched
            names = [row.sequence.name for row in rows]
            self.scheduler.finish(plan, dict(zip(names, drawn.wait()[0].tolist())))

    def until_first_token(self, sequence: Sequence) -> None:
        """Steps until a sequence has drawn; the others go on."""
        while not sequence.drawn:
            self.step()

    def end(self, *sequences: Sequence) -> None:
        """Sequences are done."""
        for sequence in sequences:
            self.scheduler.end(sequence)
            self.spoke.pop(sequence.name, None)
