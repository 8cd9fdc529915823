"""Plan, products and gradients of the routed experts' Triton kernels against a dense computation in float64."""

from __future__ import annotations

import pytest
import torch
from test_experts import call, dense_oracle, operands, with_gradients

from perilune.ops.choice import force
from perilune.ops.moe import experts, routed_experts
from perilune.ops.moe.triton import configs, plan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SITU = ("situ", 4.0, 25.0)


def check(args: list[torch.Tensor], options, dtype: torch.dtype = torch.float32, tolerance: float = 3e-6) -> None:
    """Result and gradients, from inputs with poisoned memory behind every buffer."""
    expected = with_gradients(dense_oracle, args, *options)
    args = [a.to(dtype) if a.is_floating_point() and i != 2 else a for i, a in enumerate(args)]
    args[2] = args[2].float()
    with force("triton"):
        assert experts.select(args[0], args[3]).implementation == "triton"
        found = with_gradients(call, args, *options)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance * float(exact.abs().max()))


@pytest.mark.parametrize("options", [SITU, ("swiglu", 4.0, 25.0)])
def test_float32(options) -> None:
    """Widths that are no multiple of a tile: the last tiles reach into the next expert's weights."""
    check(operands(30, 12, 36, 3, 2), options)


@pytest.mark.parametrize("options", [SITU, ("situ", 0.3, None)])
def test_saturated_units(options) -> None:
    """Far beyond the caps, on either side; a product of size 1000 in float32 moves e^-a by its own rounding, 1e-4."""
    args = operands(10, 8, 4, 2, 1)
    args[0] *= 1e3
    check(args, options, tolerance=1e-4)


def test_more_rows_than_a_tile_and_an_expert_without() -> None:
    args = operands(70, 16, 8, 3, 1, favourite=1)
    check(args, SITU)
    with force("triton"):
        found = with_gradients(call, [a.float() if a.is_floating_point() else a for a in args], *SITU)
    assert all(not dw[e].any() for dw in found[3:] for e in (0, 2))


@pytest.mark.parametrize("rows", sorted(configs.HALF))
def test_float16(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "MANY", 0 if rows == 128 else 10**9)
    check(operands(20, 72, 40, 3, 2), SITU, torch.float16, 4e-3)


def test_t51_bfloat16_products_are_widened_for_the_interpreter() -> None:
    """Its own product of bfloat16 is garbage, without an exception."""
    check(operands(12, 8, 16, 2, 1), SITU, torch.bfloat16, 3e-2)


def test_few_programs_take_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: getattr(configs.FULL, name)._replace(programs=1) for name in ("glu", "product", "weights")}
    monkeypatch.setattr(configs, "FULL", configs.FULL._replace(group=2, **few))
    check(operands(70, 8, 36, 2, 1), SITU)


def test_frozen_weights_get_no_gradient() -> None:
    z, index, mixing, *weights = (a.float() if a.is_floating_point() else a for a in operands(10, 8, 4, 2, 1))
    whole = with_gradients(lambda *args: call(*args, *SITU), [z, index, mixing, *weights])
    z.requires_grad_()
    dout = torch.randn(z.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64).float()
    with force("triton"):
        (dz,) = torch.autograd.grad(call(z, index, mixing, *weights, *SITU), z, dout)
        frozen = [w.requires_grad_(i == 2) for i, w in enumerate(weights)]
        (dw2,) = torch.autograd.grad(call(z.detach(), index, mixing, *frozen, *SITU), weights[2], dout)
    torch.testing.assert_close(dz, whole[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(dw2, whole[5], rtol=0, atol=1e-5)


def test_no_tokens() -> None:
    args = [a.float() if a.is_floating_point() else a for a in operands(4, 8, 8, 4, 2)]
    with force("triton"):
        out, dz, dweight, *weights = with_gradients(call, [a[:0] if i < 3 else a for i, a in enumerate(args)], *SITU)
    assert out.shape == dz.shape == (0, 8) and dweight.shape == (0, 2)
    assert not any(w.any() for w in weights)


def test_sizes_that_the_copy_engine_does_not_take_go_to_torch() -> None:
    args = operands(4, 6, 8, 4, 2, dtype=torch.float32)
    with force("triton"):
        choice = experts.select(args[0], args[3])
        assert choice.implementation == "torch" and "6" in choice.reason
        args[2] = args[2].float()
        assert routed_experts(*args).shape == (4, 6)


@pytest.mark.parametrize(("tokens", "count", "active", "tile"), [(700, 20, 3, 64), (1, 3, 2, 128), (300, 2, 1, 64)])
def test_plan_is_a_stable_sort(tokens: int, count: int, active: int, tile: int) -> None:
    """More slots than a block, more experts than a tile of the sums."""
    index = torch.rand(tokens, count, generator=torch.Generator().manual_seed(1)).topk(active).indices
    found = plan.row_plan(index, count, tile)
    flat = index.flatten().tolist()
    row, start = 0, []
    places = {}
    for e in range(count):
        start.append(row // tile)
        mine = [slot for slot, of in enumerate(flat) if of == e]
        assert int(found.count_E[e]) == len(mine)
        places |= {slot: row + i for i, slot in enumerate(mine)}
        assert found.expert_T[row // tile : row // tile + -(-len(mine) // tile)].eq(e).all()
        row += -(-len(mine) // tile) * tile
    assert found.start_E1.tolist() == [*start, row // tile] and row <= found.rows
    assert found.place_R.tolist() == [places[slot] for slot in range(len(flat))]
    assert found.slot_R[found.place_R.long()].tolist() == list(range(len(flat)))
