"""Prefill passes recorded as CUDA graphs give what the same chunks give as they are, and a warm engine compiles nothing."""

from __future__ import annotations

import copy
import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch

from perilune.bench.engine_driver import ONE_CLASS, Driver, pages_of, random_ids
from perilune.bench.engine_prefix import BareModel, Sizes
from perilune.config.presets import mini, nano
from perilune.model import Transformer, init_weights
from perilune.model.cast import compute_in
from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import ExportState
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams
from perilune.serve.runner import ModelRunner, PagePool, pool_geometry
from perilune.serve.runner.prefill_graphs import PrefillGraphs
from perilune.serve.runner.runner import Scores
from perilune.serve.schedule import Limits, Row
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def dense_mini(layers: int = 4) -> Transformer:
    """Experts left out: their choice would amplify rounding."""
    cfg = dataclasses.replace(mini(), num_layers=layers, dense_layers=layers, moe=None)
    with torch.device("cuda"):
        return compute_in(init_weights(Transformer(cfg), 0, device="cuda").eval(), torch.bfloat16)


def bench(model: Transformer, cases, recorded: bool):
    """A runner over a pool of NaN, and rows of chunks behind prefixes that it has prefilled as they are."""
    geometry = pool_geometry(model.cfg, torch.bfloat16, device=model.device)
    pool = PagePool(model.cfg, geometry, 200, torch.bfloat16, model.device)
    pool.bytes_PR.fill_(255)
    runner = ModelRunner(model, pool, model.cfg.vocab_size)
    passes, runner.prefill_graphs = runner.prefill_graphs, None
    assert passes is not None
    free, rows = iter(range(200)), []
    torch.manual_seed(0)
    for number, (start, end, marks) in enumerate(cases):
        ids = torch.randint(0, 1000, (end,)).tolist()
        pages, state = (
            [next(free) for _ in range(geometry.pages_for(end))],
            tuple(next(free) for _ in range(geometry.groups)),
        )
        pool.bytes_PR[list(state)] = 0
        sequence = SimpleNamespace(name=f"s{number}", ids=ids, content=None, prompt=end)
        if start:
            runner.passes.alone(Chunk("r", 0, 0, start, pages, state, (), ()), ids[:start], "none")
        exports = tuple(ExportState(mark, tuple(next(free) for _ in range(geometry.groups)), "test") for mark in marks)
        rows.append(Row(sequence, Chunk("r", 0, start, end, pages, state, (), exports), number != 1))
    runner.prefill_graphs = passes if recorded else None
    return runner, rows


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


CASES = {
    "alone": [(0, 40, ())],
    "alone, whole room": [(0, 512, (64, 256, 512))],
    "alone behind a prefix": [(4 * 512, 4 * 512 + 1000, (4 * 512 + 64, 4 * 512 + 960))],
    "one token": [(700, 701, ())],
    "together": [(0, 40, ()), (320, 583, (512,)), (1024, 1025, ()), (0, 512, (64, 128)), (64, 900, (192, 896))],
    "long": [(0, 6000, (64, 5952)), (0, 1000, (960,))],
}


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_recorded_is_as_it_is(name: str) -> None:
    """Scores, states and cached tokens; what is filled up reaches nobody."""
    model, results = dense_mini(), []
    for recorded in (False, True):
        runner, rows = bench(model, CASES[name], recorded)
        scores = Scores()
        if recorded:
            assert runner.prefill_graphs is not None
            assert runner.prefill_graphs.room_for([row.chunk for row in rows]) is not None
        runner.prefill(rows, scores)
        torch.cuda.synchronize()
        written = {
            page: runner.pool.bytes_PR[page].clone()
            for row in rows
            for page in (*row.chunk.state, *(page for export in row.chunk.exports for page in export.targets))
        }
        cached = [
            cache[row.chunk.pages].flatten(0, 1)[: row.chunk.end].clone()
            for row in rows
            for cache in runner.pool._caches
        ]
        results.append((scores.logits, written, cached))
    (plain, states, entries), (ours, our_states, our_entries) = results
    assert plain.keys() == ours.keys()
    worst = max(off(ours[name], plain[name]) for name in plain) if plain else 0.0
    layer = runner.pool.geometry.state_bytes
    worst_state = max(
        off(
            our_states[page][:layer].view(torch.float32)[: 64 * 64], states[page][:layer].view(torch.float32)[: 64 * 64]
        )
        for page in states
    )
    worst_entry = max(off(a, b) for a, b in zip(our_entries, entries, strict=True))
    print(f"{name}: scores {worst:.1e}, states {worst_state:.1e}, cached {worst_entry:.1e}")
    assert max(worst, worst_state, worst_entry) < 2e-2


@torch.inference_mode()
def test_a_prompt_through_several_rooms_is_as_exact_as_the_bare_model() -> None:
    """Beside float32. Bits differ: keys and values of a whole room are rebuilt, by another product of the library's."""
    model, chunk = dense_mini(8), 8192
    ids = random_ids(model, 2 * chunk + 4096)
    limits = Limits(step_tokens=chunk, chunk=chunk, classes=ONE_CLASS)
    driver = Driver(model, pages_of(model, 2 * len(ids), 8), limits)
    sequence = driver.add(ids)
    driver.until_first_token(sequence)
    passes = driver.runner.prefill_graphs
    assert passes is not None and passes.failed is None
    assert len(passes._recordings) == 2, "two passes of 8192 tokens, and one behind more than their room holds"
    (ours,) = driver.scores.values()
    exact = copy.deepcopy(model).float()
    exact.compute_dtype = torch.float32
    sizes = Sizes(prefix=len(ids), suffix=0, chunk=chunk, peer_chunk=chunk, cold=0)
    bare, truth = (BareModel(one, sizes) for one in (model, exact))
    for one in (bare, truth):
        one.start(ids)
    errors = off(ours, truth.scores), off(bare.scores, truth.scores)
    print(f"engine {errors[0]:.2e}, bare model {errors[1]:.2e}, apart {off(ours, bare.scores):.2e}")
    assert errors[0] < 1.3 * errors[1]


@torch.inference_mode()
def test_a_recording_serves_one_after_the_other() -> None:
    """The same pass again gives the same bits, whatever ran between."""
    model = dense_mini(2)
    found = []
    runner, rows = bench(model, [(0, 500, (64,)), (0, 450, ()), (0, 30, ())], True)
    for order in ([0], [1, 2], [2, 1, 0], [0]):
        for number in order:
            runner.pool.bytes_PR[list(rows[number].chunk.state)] = 0
        scores = Scores()
        runner.prefill([rows[number] for number in order], scores)
        found.append(scores)
    first, last = (found[place].logits["s0"] for place in (0, -1))
    assert torch.equal(first, last) and bool(torch.isfinite(first).all())


def test_a_warm_engine_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = ByteTokenizer()
    model = init_weights(Transformer(dataclasses.replace(nano(), vocab_size=tokenizer.vocab_size)), 0).cuda().eval()
    settings = EngineSettings(cache_bytes=2**28, sequences=8)
    running = LocalEngine(
        compute_in(model, torch.bfloat16), tokenizer, name="nano", context_length=4096, settings=settings
    )
    assert PrefillGraphs.why_not(model, running.core.runner.pool) is None
    seconds = running.warm_up()
    before = running.core.runner.prefill_graphs
    assert before is not None and before.failed is None
    caplog.clear()
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(seed=1, top_p=0.9, max_tokens=6, logprobs=2),
        SamplingParams(seed=1, top_k=9, frequency_penalty=0.5, max_tokens=6),
    )
    rare = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)  # whose passes are not recorded
    asked = [
        torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed % 5)).tolist()
        for seed, length in enumerate((3, 64, 65, 700, 1500, 1500, 3000))
    ]
    with caplog.at_level(logging.WARNING, "perilune.serve.warm_up"):
        for params in kinds:
            for prompt in asked:
                list(running.complete([prompt, prompt[: len(prompt) // 2 + 1]], params))
        missed = list(caplog.messages)
        for prompt in asked:
            list(running.complete([prompt], rare))
    print(f"warm in {seconds:.1f} s; missed of scored prompts: {caplog.messages}")
    assert not missed
    assert len(caplog.messages) < 4, (
        "a step depends on how much is cached, and is compiled for some powers of two of it"
    )
    assert running.admin.check_invariants() == []
    running.close()
