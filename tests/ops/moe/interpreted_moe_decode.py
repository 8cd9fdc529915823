"""The experts of a few tokens by Triton kernels, against the loop over experts in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.moe import mlp_decode, moe_decode, triton_decode
from perilune.ops.moe.decode import MAX_MLP_TOKENS, _apart, select
from perilune.ops.moe.experts import routed_experts

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [(1, 64, 48, 5, 2), (3, 20, 33, 7, 3), (8, 16, 24, 3, 1)]  # N, L, F, E, A


def operands(size: tuple[int, ...], weights: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    tokens, width, hidden, experts, _ = size
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    wide = randn(tokens, width + 5)
    stacks = (randn(experts, hidden, width), randn(experts, hidden, width), randn(experts, width, hidden))
    return (
        wide[:, :width],
        randn(tokens, experts),
        randn(experts) / 9,
        *((w / w.shape[-1] ** 0.5).to(weights) for w in stacks),
    )


@pytest.mark.parametrize(
    ("size", "activation", "cap", "weights"),
    [
        (SIZES[0], "situ", 25.0, torch.float32),
        (SIZES[1], "situ", None, torch.float16),
        (SIZES[1], "swiglu", None, torch.float32),
        (SIZES[2], "situ", 25.0, torch.float16),
    ],
    ids=str,
)
def test_routed_step_equals_float64(size: tuple, activation: str, cap: float | None, weights: torch.dtype) -> None:
    z, logits, bias, *stacks = operands(size, weights)
    active = size[-1]
    with force("torch"):
        right = moe_decode(
            logits.double(),
            bias.double(),
            z.double(),
            *(w.double() for w in stacks),
            active,
            activation,
            linear_beta=cap,
        )
    with force("triton"):
        assert select(z, stacks[0]).implementation == "triton"
        got = moe_decode(logits, bias, z, *stacks, active, activation, linear_beta=cap)
        alone = [
            moe_decode(logits[n : n + 1], bias, z[n : n + 1], *stacks, active, activation, linear_beta=cap)
            for n in range(size[0])
        ]
    assert got.dtype == z.dtype
    torch.testing.assert_close(got.double(), right, rtol=3e-6, atol=3e-6)
    assert torch.equal(got, torch.cat(alone)), "a token's result depends on its company"


@pytest.mark.parametrize("tile", [triton_decode.Tile(4, 16, 4), triton_decode.Tile(16, 32, 4)], ids=str)
def test_every_tile(tile: triton_decode.Tile) -> None:
    z, _, _, *stacks = operands(SIZES[1])
    index, weight = torch.tensor([[0, 6, 2], [1, 2, 3], [6, 5, 4]]), torch.rand(3, 3)
    with force("torch"):
        right = routed_experts(z.double(), index, weight.double(), *(w.double() for w in stacks))
    got = triton_decode.experts(z, index, weight, *stacks, (4.0, 25.0), (tile, tile))
    torch.testing.assert_close(got.double(), right, rtol=3e-6, atol=3e-6)


def test_an_mlp_is_the_expert_of_every_token() -> None:
    z, _, _, w1, w3, w2 = operands(SIZES[1])
    with force("triton"):
        got = mlp_decode(z, w1[0], w3[0], w2[0])
        assert mlp_decode(z.repeat(MAX_MLP_TOKENS, 1), w1[0], w3[0], w2[0]) is None
    index, weight = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with force("torch"):
        right = routed_experts(z.double(), index, weight.double(), *(w[:1].double() for w in (w1, w3, w2)))
    assert got is not None
    torch.testing.assert_close(got.double(), right, rtol=3e-6, atol=3e-6)


def test_pairs_that_share_experts_are_left_to_grouped_products() -> None:
    large = torch.empty(128, 3072, 3584, dtype=torch.bfloat16, device="meta")
    assert _apart(16, large) and _apart(32, large) and not _apart(128, large)
    assert _apart(64, torch.empty(64, 64, 64)), "few bytes: further launches would cost more"
