"""Rows of decoding on a GPU through the serving engine: a step of a whole model, against the traffic of its weights and states.

Weights are random, which changes nothing in time but the experts' load. `ours_ms` is what a step takes at the client: forward
pass, draw, reading of text. The peer is the replay of the recorded pass alone: what an engine could reach whose own work cost
nothing. (A sum of its kernels would count twice what they do while their predecessors end.) The bound is the least traffic at
copy speed. `extra`:

- `host_ms`: the host's own work for a step, most of it while the device works on another; waiting does not count.
- `synchronous_ms`: a step of the same engine when the next step is planned only after the last one was read.
- `target_ratio`: what `ratio` aims at.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from perilune.bench.harness import Row, commit, copy_ceiling, device_name, versions
from perilune.config.presets import preset
from perilune.model import Transformer
from perilune.model.cast import compute_in
from perilune.model.latent_moe import Experts
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer

BATCHES = (1, 8, 32)
PROMPT, NEW = 64, 96
GOAL = 1 / 1.15  # of a step's speed, by that of its kernels


@lru_cache(maxsize=1)
@torch.no_grad()
def _engine(name: str) -> LocalEngine:
    """An engine over random weights, drawn on the device: on the host a few billion numbers take minutes."""
    with torch.device("cuda"):
        model = Transformer(preset(name))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, model.cfg.init_range)
        else:
            parameter.fill_(0.5)
    compute_in(model.eval(), torch.bfloat16)
    return LocalEngine(model, ByteTokenizer(), name=name, settings=EngineSettings(cache_bytes=4 * 2**30))


def step_bytes(model: Transformer, batch: int) -> float:
    """Least traffic of a decode step: every dense weight once, each expert that some row chose, states both ways."""
    moe, kda = model.cfg.moe, model.cfg.kda
    assert moe is not None and kda is not None, "a K3-shaped model has experts and recurrent layers"
    stacked = sum(p.nbytes for m in model.modules() if isinstance(m, Experts) for p in m.parameters())
    dense = sum(p.nbytes for p in model.parameters()) - stacked - model.embed.weight.nbytes
    chosen = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
    layers = sum(kind == "kda" for kind in model.cfg.layer_mixers)
    states = 8 * layers * kda.num_heads * kda.value_dim * kda.head_dim
    return dense + chosen * stacked + batch * states


class StepTime(NamedTuple):
    """Milliseconds of a step at the client, and of the engine's thread at work for it, waiting left out."""

    step: float
    host: float


def _step_ms(engine: LocalEngine, batch: int, seed: int) -> StepTime:
    """NEW tokens of `batch` prompts less one token of others of the same length."""
    generator = torch.Generator().manual_seed(seed)
    times, busy = [], []
    for tokens in (1, NEW):
        busy.append(-_busy_ms(engine))
        prompts = torch.randint(0, 256, (batch, PROMPT), generator=generator).tolist()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in engine.complete(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)):
            pass
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        busy[-1] += _busy_ms(engine)
    return StepTime(*((values[1] - values[0]) / (NEW - 1) for values in (times, busy)))


def _busy_ms(engine: LocalEngine) -> float:
    """What the engine's thread has worked so far."""
    totals = engine.core.totals
    return 1e3 * (totals.host_seconds - totals.wait_seconds)


def _replay_ms(engine: LocalEngine, batch: int) -> float:
    """Milliseconds of the recorded pass of `batch` rows."""
    graph = engine.core.runner.recorded(batch)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@contextmanager
def _synchronous(engine: LocalEngine) -> Iterator[None]:
    """Meanwhile the engine reads each step before it plans the next one."""
    scheduler = engine.core.scheduler
    engine.core.call(lambda: setattr(scheduler, "ahead", False))
    try:
        yield
    finally:
        engine.core.call(lambda: setattr(scheduler, "ahead", True))


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """A row: decoding of `batch` sequences by a preset."""

    preset: str
    batch: int

    @property
    def name(self) -> str:
        """Of the row."""
        return f"decode_{self.preset}_b{self.batch}"

    @property
    def shape(self) -> str:
        """Of the row."""
        return f"{self.preset}, bf16, batch {self.batch}, prompt {PROMPT}, {NEW} new"

    def measure(self, device: str, samples: int) -> Row:
        """Time `samples` answers behind one that compiles and records."""
        engine = _engine(self.preset)
        model, seeds = engine.core.runner.model, range(1, samples + 1)
        _step_ms(engine, self.batch, 0)
        times, hosts = zip(*(_step_ms(engine, self.batch, seed) for seed in seeds))
        ours, replay = statistics.median(times), _replay_ms(engine, self.batch)
        with _synchronous(engine):
            serial = statistics.median(_step_ms(engine, self.batch, seed).step for seed in seeds)
        extra = {"host_ms": statistics.median(hosts), "synchronous_ms": serial, "target_ratio": GOAL}
        return Row(
            name=self.name, shape=self.shape, ours_ms=ours, peer="replay of the recorded pass", peer_ms=replay,
            ratio=replay / ours, bound_ms=1e3 * step_bytes(model, self.batch) / copy_ceiling(device),
            device=device_name(device), versions=versions(), commit=commit(), ours_spread_ms=(min(times), max(times)),
            peer_spread_ms=None, samples=samples, extra=extra,
        )  # fmt: skip


def cases(presets: Sequence[str] = ("mini",)) -> Iterator[DecodeCase]:
    """Rows of the presets, a batch each."""
    for name in presets:
        for batch in BATCHES:
            yield DecodeCase(preset=name, batch=batch)
        _engine.cache_clear()
