"""The experts of a few tokens on a GPU against float64, in every dtype; Newton-Schulz against the exact iteration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.moe import decode, mlp_decode, moe_decode, routed_experts, triton_decode
from perilune.ops.moe.decode import select
from perilune.ops.newton_schulz import GRAM_RATIO, newton_schulz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TILES = (triton_decode.HIDDEN, triton_decode.Tile(8, 512, 4))


def operands(tokens: int, width: int, hidden: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Weights amid NaN."""
    torch.manual_seed(0)

    def guarded(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        buffer = torch.full((size + 8192,), torch.nan, dtype=dtype, device="cuda")
        buffer[4096 : 4096 + size] = torch.randn(size, device="cuda").to(dtype) / shape[-1] ** 0.5
        return buffer[4096 : 4096 + size].view(shape)

    stacks = guarded(experts, hidden, width), guarded(experts, hidden, width), guarded(experts, width, hidden)
    return torch.randn(tokens, width, device="cuda"), torch.randn(tokens, experts, device="cuda"), *stacks


def error(got: Tensor, right: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - right).norm() / right.norm())


@pytest.mark.parametrize("size", [(1, 3584, 3072, 24, 16), (8, 512, 640, 16, 4), (3, 100, 36, 5, 2)], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16])
def test_routed_step_equals_float64(
    size: tuple, weights: torch.dtype, tokens: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LAUNCH_BYTES", float("inf"))  # never grouped
    z, logits, *stacks = operands(*size[:4], weights)
    z, bias, active = z.to(tokens), torch.zeros(size[3], device="cuda"), size[4]
    with force("torch"):
        right = moe_decode(logits.double(), bias.double(), z.double(), *(w.double() for w in stacks), active)
    with force("triton"):
        assert select(z, stacks[0]).implementation == "triton"
        got = moe_decode(logits, bias, z, *stacks, active)
        assert got.dtype == tokens and error(got, right) < (3e-6 if tokens == torch.float32 else 3e-3)
        assert torch.equal(got, moe_decode(logits, bias, z, *stacks, active))
        assert torch.equal(got[:1], moe_decode(logits[:1], bias, z[:1], *stacks, active)), "depends on its company"


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_and_a_captured_step(tile: triton_decode.Tile) -> None:
    z, _, *stacks = operands(4, 1000, 520, 8, torch.bfloat16)
    index, weight = torch.rand(4, 8, device="cuda").topk(3).indices, torch.rand(4, 3, device="cuda")
    right = routed_experts(z.double(), index, weight.double(), *(w.double() for w in stacks))
    call = lambda: triton_decode.experts(z, index, weight, *stacks, (4.0, 25.0), (tile, tile))  # noqa: E731
    assert error(call(), right) < 3e-6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    index.copy_(index.flip(0))
    graph.replay()
    assert torch.equal(out, call())


def test_an_mlp_is_the_expert_of_every_token() -> None:
    z, _, *stacks = operands(4, 1000, 520, 1, torch.bfloat16)
    got = mlp_decode(z.bfloat16(), *(w[0] for w in stacks))
    index, weight = torch.zeros(4, 1, dtype=torch.int64, device="cuda"), torch.ones(4, 1, device="cuda")
    right = routed_experts(z.bfloat16().double(), index, weight.double(), *(w.double() for w in stacks))
    assert got is not None and error(got, right) < 3e-3


@pytest.mark.parametrize("shape", [(3, 64, 64 * GRAM_RATIO), (2, 64, 200), (2, 300, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_equals_the_exact_iteration(shape: tuple, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, device="cuda")
    x[0] *= 1e-6
    exact = newton_schulz(x.double().cpu()).cuda()
    assert error(newton_schulz(x, dtype=dtype), exact) < (1e-4 if dtype == torch.float32 else 3e-2)
    x[1] = 0
    assert (newton_schulz(x, dtype=dtype)[1] == 0).all()
