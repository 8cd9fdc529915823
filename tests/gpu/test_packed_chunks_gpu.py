"""Chunks of several prompts in one pass on a GPU: each op against float64 or each chunk alone, then whole layers; a long hit."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from perilune.bench.engine_prefix import CachedPrefix, Sizes
from perilune.config.presets import mini
from perilune.model import Transformer, init_weights
from perilune.model.cast import compute_in
from perilune.model.paged import PagedState
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, packed_kda_states
from perilune.ops.mla.packed import CachedChunks, attend_packed
from perilune.ops.mla.packed import select as select_attention
from perilune.ops.packed_conv import Chunks, packed_conv
from perilune.ops.packed_conv import select as select_conv
from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import ExportState
from perilune.serve.runner import PagePool, pool_geometry
from perilune.serve.runner.rows import chunk_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS, PAST = (300, 5, 1, 129, 700), (1000, 0, 63, 64, 4097)


def upload(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()


@pytest.mark.parametrize("widths", [(192, 128), (96, 64)])
def test_attention_behind_caches(widths):
    torch.manual_seed(0)
    heads, key = 4, widths[0]
    chunks = CachedChunks.of(LENGTHS, PAST, 512, upload)
    rooms = chunks.begins[-1] + -(-(LENGTHS[-1] + PAST[-1]) // 512) * 512
    tokens = chunks.offsets[-1]
    q = torch.randn(tokens, heads, key, device="cuda").bfloat16()
    k, v = (torch.randn(rooms, heads, width, device="cuda").bfloat16() for width in widths)
    with force("torch"):
        truth = attend_packed(q.double(), k.double(), v.double(), key**-0.5, chunks)
        plain = attend_packed(q, k, v, key**-0.5, chunks)
    limit = 2 * float((plain.double() - truth).abs().max())
    for wanted in (None, "triton"):
        with force(wanted) if wanted else nullcontext():
            choice = select_attention(q, k, v, key**-0.5)
            got = attend_packed(q, k, v, key**-0.5, chunks)
        error = float((got.double() - truth).abs().max())
        print(f"{widths} {choice.implementation}: error {error:.2e}, limit {limit:.2e}")
        assert choice.implementation in ("cuda", "triton") and error <= limit, choice


def test_convolution_goes_on():
    torch.manual_seed(0)
    points = [*enumerate(LENGTHS), (0, 64), (3, 2), (4, 640)]
    chunks = Chunks.of(LENGTHS, points, upload)
    x = torch.randn(sum(LENGTHS), 3072, device="cuda").bfloat16()
    weight, window = torch.randn(3072, 4, device="cuda"), torch.randn(len(LENGTHS), 3072, 3, device="cuda").bfloat16()
    assert select_conv(x, weight).implementation == "triton"
    got, windows = packed_conv(x, weight, window, chunks)
    with force("torch"):
        truth, exact = packed_conv(x.double(), weight.double(), window.double(), chunks)
    torch.testing.assert_close(got.double(), truth, rtol=1e-2, atol=1e-2)
    assert torch.equal(windows.double(), exact)


def test_states_inside_packed_sequences():
    torch.manual_seed(0)
    heads, tokens, cuts = 4, sum(LENGTHS), (0, *torch.tensor(LENGTHS).cumsum(0).tolist())
    inputs = [torch.randn(1, tokens, heads, 64, device="cuda").bfloat16() for _ in range(4)]
    inputs.append(torch.randn(1, tokens, heads, device="cuda").bfloat16())
    before = torch.randn(len(LENGTHS), heads, 64, 64, device="cuda")
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0,
        "safe_gate": True, "A_log": torch.zeros(heads, device="cuda"), "state_v_first": True,
    }  # fmt: skip
    marks = [(0, 64), (0, 256), (3, 128), (4, 640)]
    o, finals, states = packed_kda_states(*inputs, cuts, marks, initial_state=before, **options)

    def alone(n: int, tokens: int):
        part = (x[:, cuts[n] : cuts[n] + tokens] for x in inputs)
        return chunk_kda(*part, initial_state=before[n : n + 1], output_final_state=True, **options)

    def off(a, b) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())

    for n, (begin, end) in enumerate(pairwise(cuts)):
        truth, last = alone(n, end - begin)
        print(f"sequence {n}: o {off(o[:, begin:end], truth):.1e}, state {off(finals[n], last[0]):.1e}")
        assert off(o[:, begin:end], truth) < 1e-2 and off(finals[n], last[0]) < 1e-2
    for (n, tokens), state in zip(marks, states, strict=True):
        assert off(state, alone(n, tokens)[1][0]) < 1e-2, (n, tokens)


@torch.inference_mode()
def test_layers_of_packed_chunks():
    """Four layers of `mini`, experts left out: their choice would amplify rounding. States written inside chunks, pages of NaN."""
    cfg = dataclasses.replace(mini(), num_layers=4, dense_layers=4, moe=None)
    with torch.device("cuda"):
        model = compute_in(init_weights(Transformer(cfg), 0, device="cuda").eval(), torch.bfloat16)
    geometry = pool_geometry(cfg, torch.bfloat16, device=model.device)
    size, groups, unit = geometry.page_tokens, geometry.groups, geometry.unit
    cases = [
        (0, 40, ()),
        (5 * unit, 9 * unit + 7, (8 * unit,)),
        (2 * size, 2 * size + 1, ()),
        (0, size, (unit, 2 * unit)),
    ]
    results = []
    for together in (True, False):
        pool = PagePool(cfg, geometry, 64, torch.bfloat16, model.device)
        pool.bytes_PR.fill_(255)
        free, chunks, outs = iter(range(64)), [], []
        torch.manual_seed(0)
        ids = [torch.randint(0, 1000, (end,), device="cuda") for _, end, _ in cases]

        def run(parts, indices, pool=pool, ids=ids):
            rows = chunk_rows(parts, size, model.device)
            row = torch.cat([ids[i][part.start : part.end] for i, part in zip(indices, parts)])[None]
            hidden = model.hidden(row, PagedState(pool.layers(rows), rows))
            return list(hidden[0].split([part.end - part.start for part in parts]))

        for index, (start, end, marks) in enumerate(cases):
            pages, state = [next(free) for _ in range(-(-end // size))], tuple(next(free) for _ in range(groups))
            pool.bytes_PR[list(state)] = 0
            if start:
                run([Chunk("r", 0, 0, start, pages, state, (), ())], [index])
            exports = tuple(ExportState(mark, tuple(next(free) for _ in range(groups)), "test") for mark in marks)
            chunks.append(Chunk("r", 0, start, end, pages, state, (), exports))
        if together:
            outs = run(chunks, range(len(cases)))
        else:
            outs = [run([chunk], [index])[0] for index, chunk in enumerate(chunks)]
        kept = [pool.bytes_PR[list(export.targets)] for chunk in chunks for export in chunk.exports]
        results.append((outs, kept))
    for index, (a, b) in enumerate(zip(results[0][0], results[1][0], strict=True)):
        error = float((a.double() - b.double()).norm() / b.double().norm())
        print(f"case {index}: {error:.1e}")
        assert error < 2e-2
    layer = geometry.state_bytes // 4
    for a, b in zip(results[0][1], results[1][1], strict=True):
        first, second = (x[0, : layer * 4].view(torch.float32)[: 64 * 64].double() for x in (a, b))
        assert float((first - second).norm() / second.norm()) < 2e-2


def test_a_long_prefix_is_worth_what_it_cost():
    """24K tokens: scores behind a hit, and behind one that the host or a file kept, are the bare model's within bfloat16."""
    sizes = Sizes(prefix=24_000, suffix=500, chunk=4096, peer_chunk=4096, cold=1)
    prefix = CachedPrefix("nano", "cuda", sizes)
    differences = {}
    for kind in ("hit", "host", "disk"):
        if kind == "host":
            prefix.evict()
        elif kind == "disk":
            prefix.restart()
        rest = prefix.tokens(sizes.suffix)
        prefix.hit(prefix.ids + rest)
        prefix.bare.go_on(rest)
        differences[kind] = prefix.difference()
    print(f"{differences}, cold {prefix.cold} s, bare {prefix.peer_cold} s")
    assert max(differences.values()) < 0.1
