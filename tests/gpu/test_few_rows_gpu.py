"""Products of few rows on a GPU against float64, alone and in company; kernels that begin early, in graphs and out of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.attnres import read
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.choice import force
from perilune.ops.few_rows.cuda.mixture import mixture
from perilune.ops.linear import gated_linear, linear, linears, normed_linear
from perilune.ops.moe import MixtureWeights, layer_decode, layer_obstacle
from perilune.ops.moe.router import route
from perilune.ops.norm import rms_norm_reference
from perilune.ops.situ_glu import situ_glu_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = (1, 8, 9, 32)  # each another kernel


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Amid NaN."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 8192,), torch.nan, dtype=dtype, device="cuda")
    buffer[4096 : 4096 + size] = (torch.randn(size, device="cuda") / shape[-1] ** 0.5).to(dtype)
    return buffer[4096 : 4096 + size].view(shape)


def close(got: Tensor, truth: Tensor, limit: float, what: object) -> None:
    assert got.isfinite().all(), what
    error = float((got.double() - truth).norm() / truth.norm())
    assert error < limit, (what, error)


ROWS = {32: 1000, 256: 16400, 1024: 7000, 7168: 16400}  # by width: blocks of one to eight tiles of them


@pytest.mark.parametrize("width", ROWS)
@torch.no_grad()
def test_projections_equal_float64_alone_and_in_company(width: int) -> None:
    torch.manual_seed(0)
    weights = [normal(rows, width) for rows in (ROWS[width], 16, 2)]
    scale = 1 + normal(width, dtype=torch.float32)
    x32, gate32 = normal(32, width) * width**0.5, normal(32, width) * width**0.5
    alone = [linear(row, weights[0]) for row in x32.split(1)]
    for tokens in TOKENS:
        x, gate, exact = x32[:tokens], gate32[:tokens], x32[:tokens].double()
        got = linears(x, *weights)
        for y, weight in zip(got, weights, strict=True):
            close(y, exact @ weight.double().T, 4e-3, (tokens, len(weight)))
        for row, y in enumerate(got[0].split(1)):
            assert torch.equal(y, alone[row]), f"row {row} of {tokens} depends on its company"
        if tokens not in (1, 32):
            continue
        truth = rms_norm_reference(exact, scale, 1e-3) @ weights[0].double().T
        close(normed_linear(x, scale, 1e-3, weights[0]), truth, 5e-3, ("norm", tokens))
        truth = (exact * gate.double().sigmoid()) @ weights[0].double().T
        close(gated_linear(x, gate, weights[0]), truth, 5e-3, ("gate", tokens))


@pytest.mark.parametrize("width", [1024, 7168])
@torch.no_grad()
def test_logits_are_as_exact_as_float32(width: int) -> None:
    torch.manual_seed(0)
    router, x = normal(896, width, dtype=torch.float32), normal(9, width) * width**0.5
    _, logits, _ = mixture(x, None, router, None, None)
    truth = x.double() @ router.double().T
    plain = float((x.float() @ router.T - truth).norm() / truth.norm())
    assert logits is not None
    close(logits, truth, 3e-6, ("float32's own error", plain))


SIZES = {
    "mini": (64, 8, 1024, 512, 512, 512),
    "k3": (896, 16, 7168, 3584, 96, 192),
    "small": (32, 4, 512, 256, 320, 320),
}


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_a_layer_with_experts(name: str) -> None:
    torch.manual_seed(0)
    count, active, width, latent, hidden, shared = SIZES[name]
    w = MixtureWeights(
        normal(count, width, dtype=torch.float32) * 4, normal(count, dtype=torch.float32), normal(latent, width),
        normal(width, latent), (1 + normal(latent, dtype=torch.float32), 1e-5),
        (normal(count, hidden, latent), normal(count, hidden, latent), normal(count, latent, hidden)),
        (normal(shared, width), normal(shared, width), normal(width, shared)),
    )  # fmt: skip
    x32 = normal(32, width) * width**0.5
    assert layer_obstacle(x32, w, active) is None
    alone = torch.cat([layer_decode(x, w, active) for x in x32.split(1)])
    with force("torch"):
        routing = route(x32.double() @ w.router_ED.double().T, w.bias_E.double(), active)
    unit = lambda a, b: situ_glu_reference(a, b, 4.0, 25.0)  # noqa: E731
    z = (x32.double() @ w.down_LD.double().T).bfloat16().double()
    rows = []
    for token, chosen, weights in zip(z, routing.index_NA.tolist(), routing.weight_NA, strict=True):
        outs = [
            w.experts[2][e].double() @ unit(w.experts[0][e].double() @ token, w.experts[1][e].double() @ token)
            for e in chosen
        ]
        rows.append(sum(p * y for p, y in zip(weights, outs, strict=True)))
    gate, up, down = (matrix.double() for matrix in w.shared)
    truth = rms_norm_reference(torch.stack(rows), *w.norm) @ w.up_DL.double().T
    truth = truth + unit(x32.double() @ gate.T, x32.double() @ up.T) @ down.T
    for tokens in (1, 3, 9, 32):
        got = layer_decode(x32[:tokens], w, active)
        close(got, truth[:tokens], 6e-3, (name, tokens))
        assert torch.equal(got, alone[:tokens]), f"{tokens} tokens: a row depends on its company"


@pytest.mark.parametrize(("count", "width"), [(2, 512), (5, 1024), (9, 2048)])
@torch.no_grad()
def test_reads_over_depth(count: int, width: int) -> None:
    torch.manual_seed(0)
    *bank, live = (normal(32, width) * width**0.5 for _ in range(count))
    pending = normal(32, width) * width**0.5
    weight, query, scale = (1 + normal(width, dtype=torch.float32) for _ in range(3))
    weight = weight * width**-0.5
    total = (live.double() + pending.double()).bfloat16()
    truth = mix_reference([x.double() for x in (*bank, total)], (weight * query).double(), 1e-3)
    truth = rms_norm_reference(truth, scale, 1e-4)
    whole, kept = read(bank, live, pending, weight, 1e-3, scale, 1e-4, query)
    close(whole, truth, 4e-3, (count, width))
    assert torch.equal(kept, total)
    for row in (0, 31):
        rows = [x[row : row + 1] for x in (*bank, live, pending)]
        assert torch.equal(read(rows[:-2], *rows[-2:], weight, 1e-3, scale, 1e-4, query)[0], whole[row : row + 1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = read(bank, live, pending, weight, 1e-3, scale, 1e-4, query)
    graph.replay()
    assert torch.equal(out, whole)


@torch.no_grad()
def test_kernels_that_begin_early_wait_for_what_they_read() -> None:
    """A chain in which every product reads the last one's result, with buffers that are used again at once: in a graph, with
    a kernel of torch in between, against the same kernels one by one."""
    torch.manual_seed(0)
    width, length = 1024, 24
    weights = [normal(width, width) * 1.5 for _ in range(length)]
    scale = torch.ones(width, device="cuda")

    def chain(x: Tensor, stop: bool) -> Tensor:
        for i, weight in enumerate(weights):
            x = normed_linear(x, scale, 1e-6, weight)
            if i % 5 == 4:
                x = x + 0.25
            if stop:
                torch.cuda.synchronize()
        return x

    for tokens in (1, 9, 32):
        x = torch.randn(tokens, width, device="cuda").bfloat16()
        right = chain(x, stop=True)
        chain(x, stop=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x, stop=False)
        for turn in range(50):
            graph.replay()
            assert torch.equal(out, right), (tokens, turn)
        x.copy_(x.flip(0))
        graph.replay()
        assert torch.equal(out, right.flip(0)), tokens
        for _ in range(20):
            assert torch.equal(chain(x, stop=False), right.flip(0)), ("without a graph", tokens)
