"""Speed of the serving engine beside what it must not be slower than: the bare model, a suffix alone, an idle machine.

Rows (random weights, greedy, no HTTP; `bench serve` measures whole requests):

- `engine_decode_b…`: one step of sequences of different lengths; peer: the bare model's step on a batch of equal length.
- `engine_ttft_hit`: first token of a prompt whose prefix is cached; peer: the bare model on the rest, with the prefix's state
  at hand, which is what a cache can give at best.
- `engine_ttft_alone`: the same hit; peer: first token of the rest as a prompt of its own, whose attention sees no prefix.
- `engine_ttft_cold`: the same prompt, nothing cached; peer: the bare model, one pass over all of it.
- `engine_short_in_burst`: first token of a short prompt that arrives among long ones; peer: the same without class budgets.
- `engine_aborts`: a load of which a tenth is stopped half-way, time a finished token; peer: the load without stops.
- `scheduler_step_…`: planning and settling a decoding step of 64 sequences, at two lengths; no model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from perilune.bench.harness import Case, Row, run_suite
from perilune.config.presets import preset
from perilune.errors import ConfigError
from perilune.model import ModelState, Transformer, init_weights
from perilune.serve.cache import HybridCache, RootKey, TokenChain, cache_geometry
from perilune.serve.runner import ModelRunner, PagePool, pool_geometry
from perilune.serve.schedule import Limits, Scheduler, Sequence, ServiceClass, service_classes

CONTEXT = 8192
BATCHES = (1, 8, 32)
ROWS_OF_SCHEDULER = 64
ONE_CLASS = (ServiceClass(name="all", up_to=2**62),)


@lru_cache(maxsize=1)
def _model(name: str, device: str) -> Transformer:
    model = init_weights(Transformer(preset(name)), 0).to(device).eval()
    model.compute_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return model


class Bench:
    """Scheduler, cache and runner of a model, driven by hand.

    Args:
        model: greedy answers are drawn from it.
        pages: of the pool.
        limits: of the scheduler.
    """

    def __init__(self, model: Transformer, pages: int, limits: Limits) -> None:
        self.geometry = pool_geometry(model.cfg, model.compute_dtype)
        self.cache = HybridCache(self.geometry, pages)
        self.scheduler = Scheduler(self.cache, limits)
        pool = PagePool(model.cfg, self.geometry, pages, model.compute_dtype, model.device)
        self.runner = ModelRunner(model, pool, model.cfg.vocab_size)
        self._names = itertools.count()

    def add(self, ids: list[int]) -> Sequence:
        """Queue a prompt."""
        sequence = Sequence(f"s{next(self._names)}", ids, TokenChain(RootKey(model="m"), self.geometry.unit, ids))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        """One step, greedy."""
        plan = self.scheduler.plan()
        assert plan is not None, "nothing can be computed"
        logits = self.runner.run(plan).logits
        best = torch.stack(list(logits.values())).argmax(-1).tolist() if logits else []
        self.scheduler.finish(plan, dict(zip(logits, best)))

    def until_first_token(self, sequence: Sequence) -> None:
        """Steps until a sequence has drawn; the others go on."""
        while not sequence.drawn:
            self.step()

    def end(self, *sequences: Sequence) -> None:
        """Sequences are done."""
        for sequence in sequences:
            self.scheduler.end(sequence)


def _ids(model: Transformer, count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, model.cfg.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _pages(model: Transformer, tokens: int, sequences: int) -> int:
    geometry = pool_geometry(model.cfg, model.compute_dtype)
    return 2 * geometry.pages_for(tokens) + sequences * (4 * geometry.groups + 2) + 8


def _decode(model: Transformer, batch: int, length: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A decoding step of the engine, and one of the bare model."""
    limits = Limits(sequences=batch, step_tokens=1 << 16, chunk=1 << 16, classes=ONE_CLASS)
    bench = Bench(model, _pages(model, 2 * batch * length, batch), limits)
    lengths = [length // 2 + index * length // (2 * batch) for index in range(batch)]
    sequences = [bench.add(_ids(model, count, seed)) for seed, count in enumerate(lengths)]
    while any(sequence.drawn < 2 for sequence in sequences):
        bench.step()
    mean = sum(lengths) // batch
    with torch.inference_mode():
        state = model.new_state(batch, capacity=4 * length)
        for start in range(0, mean, 512):
            ids = torch.tensor([_ids(model, min(512, mean - start), start)] * batch, device=model.device)
            model(ids, state, logits="none")
    last = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def bare() -> None:
        logits = model(last, state, logits="last").logits_BTZ
        assert logits is not None
        logits[:, -1].argmax(-1).tolist()

    return bench.step, bare


def _first_token(model: Transformer, prefix: int, suffix: int, beside: str) -> tuple[Callable[[], Any], Callable]:
    """First token of prefix and suffix, beside that of "state", the suffix behind a state at hand; "alone", the suffix as a
    prompt; "pass", all of it in one pass and nothing cached for us either."""
    limits = Limits(step_tokens=512, chunk=512, classes=ONE_CLASS)
    bench = Bench(model, _pages(model, 4 * (prefix + suffix), 8), limits)
    base, seeds = _ids(model, prefix), itertools.count(1)

    def first(ids: list[int]) -> None:
        sequence = bench.add(ids)
        bench.until_first_token(sequence)
        bench.end(sequence)

    @torch.inference_mode()
    def bare(ids: list[int], state: ModelState) -> None:
        logits = None
        for start in range(0, len(ids), 512 if beside == "state" else len(ids)):
            part = torch.tensor([ids[start : start + 512] if beside == "state" else ids], device=model.device)
            logits = model(part, state, logits="last").logits_BTZ
        assert logits is not None
        logits[0, -1].argmax().item()

    if beside == "pass":

        def whole() -> None:
            bare(_ids(model, prefix + suffix, next(seeds)), model.new_state(1, capacity=prefix + suffix))

        return lambda: first(_ids(model, prefix + suffix, next(seeds))), whole
    first(base)

    def hit() -> None:
        first(base + _ids(model, suffix, next(seeds)))

    if beside == "alone":
        return hit, lambda: first(_ids(model, suffix, next(seeds)))
    with torch.inference_mode():
        kept = model.new_state(1, capacity=prefix + suffix)
        for start in range(0, prefix, 512):
            model(torch.tensor([base[start : start + 512]], device=model.device), kept, logits="none")

    def behind() -> None:
        with torch.inference_mode():
            state = kept.clone()
        bare(_ids(model, suffix, next(seeds)), state)

    return hit, behind


def _burst(model: Transformer, budgets: bool) -> Callable[[], Any]:
    """First token of a short prompt behind a queue of long ones."""
    classes = service_classes(CONTEXT) if budgets else ONE_CLASS
    limits = Limits(sequences=8, step_tokens=256, chunk=256, classes=classes)
    bench = Bench(model, _pages(model, 8 * CONTEXT, 16), limits)
    seeds = itertools.count(1)

    def burst() -> None:
        long = [bench.add(_ids(model, 3000, next(seeds))) for _ in range(4)]
        bench.step()
        short = bench.add(_ids(model, 60, next(seeds)))
        bench.until_first_token(short)
        bench.end(short, *long)

    return burst


def _load(model: Transformer, stopped: float) -> Callable[[], Any]:
    """A load of 24 requests of 200 + 24 tokens, eight at once; so many of them are stopped half-way."""
    limits = Limits(sequences=8, step_tokens=512, chunk=512, classes=ONE_CLASS)
    bench = Bench(model, _pages(model, 12 * 400, 8), limits)
    seeds, choice = itertools.count(1), random.Random(0)

    def load() -> None:
        finished = 0
        wanted: dict[str, int] = {}
        alive: dict[str, Sequence] = {}
        while finished < 24 * 24:  # equal work that somebody reads, whatever is stopped
            while len(alive) < 8:
                sequence = bench.add(_ids(model, 200, next(seeds)))
                alive[sequence.name] = sequence
                wanted[sequence.name] = 12 if choice.random() < stopped else 24
            bench.step()
            for sequence in list(alive.values()):
                if sequence.drawn >= wanted[sequence.name]:
                    finished += 24 if wanted[sequence.name] == 24 else 0
                    bench.end(alive.pop(sequence.name))
        bench.end(*alive.values())

    return load


def _scheduler_step(length: int) -> Callable[[], Any]:
    """Planning and settling a decoding step of 64 sequences; the cache has K3's shape."""
    geometry = cache_geometry(preset("k3"), tensor_parallel=8)
    rows = ROWS_OF_SCHEDULER
    cache = HybridCache(geometry, rows * (geometry.pages_for(length + 65536) + 4 * geometry.groups))
    limits = Limits(sequences=rows, step_tokens=1 << 30, chunk=1 << 30, classes=ONE_CLASS)
    scheduler = Scheduler(cache, limits)
    for index in range(rows):
        ids = [index] * length
        scheduler.add(Sequence(f"s{index}", ids, TokenChain(RootKey(model="m"), geometry.unit, ids)))

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None, "64 sequences decode"
        scheduler.finish(plan, {row.sequence.name: 7 for row in plan.rows})

    while any(not sequence.drawn for sequence in scheduler.running.values()) or scheduler.waiting:
        step()
    return step


def cases(model_name: str, device: str) -> Iterator[Case]:
    """All rows."""
    model = _model(model_name, device)
    prefix, suffix = (CONTEXT, 512) if device == "cpu" else (65536, 1024)
    length = 512 if device == "cpu" else 4096
    for batch in BATCHES:
        yield Case(
            name=f"engine_decode_b{batch}", shape=f"{model_name}, lengths {length // 2} to {length}",
            make=lambda batch=batch: _decode(model, batch, length), peer="the bare model, equal lengths",
        )  # fmt: skip
    shape = f"{model_name}, {prefix} + {suffix} tokens"
    for name, beside, peer in (
        ("hit", "state", "the bare model behind a state at hand"),
        ("alone", "alone", f"a prompt of {suffix} tokens"),
        ("cold", "pass", "the bare model in one pass"),
    ):
        yield Case(
            name=f"engine_ttft_{name}", shape=shape, peer=peer,
            make=lambda beside=beside: _first_token(model, prefix, suffix, beside),
        )  # fmt: skip
    yield Case(
        name="engine_short_in_burst", shape=f"{model_name}, 60 tokens behind 4 × 3000",
        make=lambda: (_burst(model, True), _burst(model, False)), peer="without class budgets",
    )  # fmt: skip
    yield Case(
        name="engine_aborts", shape=f"{model_name}, 24 answers of 24 tokens read, a tenth stopped",
        make=lambda: (_load(model, 0.1), _load(model, 0.0)), peer="nothing stopped",
    )  # fmt: skip
    for tokens in (1024, 65536):
        yield Case(
            name=f"scheduler_step_{tokens}", shape=f"{ROWS_OF_SCHEDULER} sequences of {tokens} tokens, K3's pages at TP8",
            make=lambda tokens=tokens: (_scheduler_step(tokens), None),
        )  # fmt: skip


def run(
    device: str = "cpu",
    budget_seconds: float | None = None,
    model: str = "nano",
    *,
    results: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the rows; see `bench.kernels.run`.

    Args:
        model: a preset.

    Raises:
        ConfigError: unknown device or preset.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r}; allowed: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' asked for, but torch sees no CUDA device; use 'cpu'")
    chosen = model or ("nano" if device == "cpu" else "mini")
    return run_suite(
        cases(chosen, device), device=device, budget_seconds=budget_seconds, results=results, on_row=on_row
    )
