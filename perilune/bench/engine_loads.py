"""What the rows of `bench engine` run: each function builds a load and returns what is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from perilune.bench.engine_driver import ONE_CLASS, Driver, pages_of, random_ids
from perilune.bench.kimi_linear import SHAPE, pair
from perilune.bench.kimi_linear import random_ids as random_prompts
from perilune.config.presets import preset
from perilune.model import Transformer
from perilune.serve.cache import HybridCache, RootKey, TokenChain, cache_geometry
from perilune.serve.schedule import Limits, Scheduler, Sequence, service_classes

CONTEXT = 8192
ROWS_OF_SCHEDULER = 64
PROMPT, NEW = 32, 64  # tokens of the row beside transformers


def decode(model: Transformer, batch: int, length: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A decoding step of the engine, and one of the bare model."""
    limits = Limits(sequences=batch, step_tokens=1 << 16, chunk=1 << 16, classes=ONE_CLASS)
    bench = Driver(model, pages_of(model, 2 * batch * length, batch), limits, ahead=True)
    lengths = [length // 2 + index * length // (2 * batch) for index in range(batch)]
    sequences = [bench.add(random_ids(model, count, seed)) for seed, count in enumerate(lengths)]
    while any(sequence.drawn < 2 for sequence in sequences):
        bench.step()
    mean = sum(lengths) // batch
    with torch.inference_mode():
        state = model.new_state(batch, capacity=4 * length)
        for start in range(0, mean, 512):
            ids = torch.tensor([random_ids(model, min(512, mean - start), start)] * batch, device=model.device)
            model(ids, state, logits="none")
    last = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def bare() -> None:
        logits = model(last, state, logits="last").logits_BTZ
        assert logits is not None
        logits[:, -1].argmax(-1).tolist()

    return bench.step, bare


def burst_of(model: Transformer, budgets: bool) -> Callable[[], Any]:
    """First token of a short prompt behind a queue of long ones."""
    classes = service_classes(CONTEXT) if budgets else ONE_CLASS
    limits = Limits(sequences=8, step_tokens=256, chunk=256, classes=classes)
    bench = Driver(model, pages_of(model, 8 * CONTEXT, 16), limits)
    seeds = itertools.count(1)

    def burst() -> None:
        long = [bench.add(random_ids(model, 3000, next(seeds))) for _ in range(4)]
        bench.step()
        short = bench.add(random_ids(model, 60, next(seeds)))
        bench.until_first_token(short)
        bench.end(short, *long)

    return burst


def load(model: Transformer, *, stops: bool, answers: int = 60) -> Callable[[], Any]:
    """Until so many more answers to prompts of 200 tokens are whole, eight at once, of 16 to 32 tokens; every tenth request may be
    stopped half-way. The load goes on from one call to the next, so that no call begins or ends with an empty engine."""
    limits = Limits(sequences=8, step_tokens=512, chunk=512, classes=ONE_CLASS)
    bench = Driver(model, pages_of(model, 12 * 400, 8), limits)
    requests = itertools.count(1)
    alive: dict[Sequence, tuple[int, bool]] = {}

    def run() -> None:
        whole = 0
        while whole < answers:
            while len(alive) < 8:
                number = next(requests)
                tokens, stopped = 16 + 7 * number % 17, stops and number % 10 == 5
                alive[bench.add(random_ids(model, 200, number))] = (tokens // 2 if stopped else tokens, stopped)
            bench.step()
            for sequence in [sequence for sequence, (wanted, _) in alive.items() if sequence.drawn >= wanted]:
                whole += not alive.pop(sequence)[1]
                bench.end(sequence)

    return run


def together(model: Transformer, *, one_pass: bool) -> Callable[[], Any]:
    """First tokens of eight prompts of 20 to 62 tokens that arrive together; with `one_pass` as the engine runs them."""
    bench = Driver(model, pages_of(model, 8 * 200, 8), Limits(step_tokens=512, chunk=512, classes=ONE_CLASS))
    seeds = itertools.count(1)

    def run() -> None:
        sequences = [bench.add(random_ids(model, 20 + 6 * n, next(seeds))) for n in range(8)]
        while not all(sequence.drawn for sequence in sequences):
            bench.step()
        bench.end(*sequences)

    def apart() -> None:
        for n in range(8):
            sequence = bench.add(random_ids(model, 20 + 6 * n, next(seeds)))
            bench.until_first_token(sequence)
            bench.scheduler.end(sequence)

    return run if one_pass else apart


def generate() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Eight prompts of PROMPT tokens and NEW greedy tokens behind each: the engine, and transformers with the same weights.

    Raises:
        AssertionError: the two do not say the same.
    """
    ours, theirs = pair(SHAPE)
    ours.eval()
    theirs.eval()
    bench = Driver(
        ours, pages_of(ours, 8 * 2 * (PROMPT + NEW), 8), Limits(step_tokens=512, chunk=512, classes=ONE_CLASS)
    )
    seeds = itertools.count()

    def run(seed: int | None = None) -> torch.Tensor:
        prompts = random_prompts(SHAPE, 8, PROMPT, seed=next(seeds) if seed is None else seed).tolist()
        sequences = [bench.add(ids) for ids in prompts]
        while any(sequence.drawn < NEW for sequence in sequences):
            bench.step()
        bench.end(*sequences)
        return torch.tensor([sequence.ids[PROMPT : PROMPT + NEW] for sequence in sequences])

    @torch.no_grad()
    def peer(seed: int | None = None) -> torch.Tensor:
        prompt = random_prompts(SHAPE, 8, PROMPT, seed=next(seeds) if seed is None else seed)
        out = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            use_cache=True, pad_token_id=0,
        )  # fmt: skip
        return out[:, PROMPT:]

    agree = float((run(12345)[:, :8] == peer(12345)[:, :8]).float().mean())
    assert agree > 0.9, f"greedy tokens agree for only {agree:.0%}; nothing was timed"
    return run, peer


def scheduler_step(length: int) -> Callable[[], Any]:
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
