"""The routed experts on a GPU against a dense computation in float64, and next to torch's plain path in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.moe import experts, routed_experts
from perilune.ops.moe.triton import configs
from perilune.ops.moe.triton.plan import row_plan
from perilune.ops.situ_glu import situ_glu_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("poisoned_memory_warned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

NAMES = ("out", "dz", "dweight", "dw1", "dw3", "dw2")
SHAPES = [  # N, L, F, E, A
    (300, 512, 512, 64, 8),  # few rows an expert
    (2000, 512, 512, 8, 4),
    (700, 1024, 576, 5, 2),  # K3 keeps F a multiple of 128, `mid` does not
    (130, 104, 72, 3, 2),
    (1, 64, 32, 7, 3),
    (64, 3584, 3072, 4, 2),
]


def operands(tokens, width, hidden, count, active, dtype, weights=None, favourite=None, never=()) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    keys = torch.rand(tokens, count, generator=generator, device="cuda")
    keys[:, list(never)] = -1.0
    if favourite is not None:
        keys[:, favourite] = 2.0
    index = keys.topk(active, dim=-1).indices
    mixing = torch.rand(tokens, active, generator=generator, device="cuda")
    w1, w3 = (2 * normal(count, hidden, width) / width**0.5 for _ in range(2))
    w2 = normal(count, width, hidden) / hidden**0.5
    return [normal(tokens, width).to(dtype), index, mixing, *(w.to(weights or dtype) for w in (w1, w3, w2))]


def values_and_gradients(function, args: list[Tensor], *options) -> list[Tensor]:
    args = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
    out = function(*args, *options)
    generator = torch.Generator("cuda").manual_seed(9)
    dout = torch.randn(out.shape, generator=generator, device="cuda").bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [a for a in args if a.is_floating_point()], dout)]


def ours(*args) -> Tensor:
    return routed_experts(*args[:-2], beta=args[-2] or 4.0, linear_beta=args[-1])


def truth(z, index, mixing, w1, w3, w2, activation, beta, linear_beta) -> Tensor:
    """Every expert for the tokens that chose it, in float64."""
    out = torch.zeros_like(z)
    for e in range(len(w1)):
        token, slot = (index == e).nonzero(as_tuple=True)
        caps = (beta, linear_beta) if activation == "situ" else (None, None)
        h = situ_glu_reference(z[token] @ w1[e].T, z[token] @ w3[e].T, *caps)
        out = out.index_add(0, token, (h @ w2[e].T) * mixing[token, slot, None])
    return out


def error(got: Tensor, exact: Tensor) -> float:
    got, exact = got.double(), exact.double()
    return float((got - exact).norm() / exact.norm().clamp_min(1e-300))


def compare(args: list[Tensor], *options, slack: float = 1.05, floor: float = 0.0) -> None:
    """At most `slack` times the error of torch's plain path in this dtype, or `floor`; bitwise equal when repeated."""
    chosen = experts.select(args[0], args[3])
    assert chosen.implementation == "triton", chosen
    got, again = values_and_gradients(ours, args, *options), values_and_gradients(ours, args, *options)
    with force("torch"):
        plain = values_and_gradients(ours, args, *options)
    exact = values_and_gradients(truth, [a.double() if a.is_floating_point() else a for a in args], *options)
    report = []
    for name, mine, other, torchs, right in zip(NAMES, got, again, plain, exact, strict=True):
        report.append((name, error(mine, right), error(torchs, right), torch.equal(mine, other)))
        assert mine.dtype == torchs.dtype and mine.shape == torchs.shape
    bad = [r for r in report if not (r[1] <= max(slack * r[2], floor) and r[3])]
    assert not bad, f"(name, error, torch's, repeatable): {report}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(shape, dtype) -> None:
    # One token's 64 numbers are too few to tell two roundings apart.
    compare(operands(*shape, dtype), "situ", 4.0, 25.0, slack=1.05 if shape[0] > 1 else 2.0)


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_float32(shape) -> None:
    compare(operands(*shape, torch.float32), "situ", 4.0, 25.0, slack=2.0, floor=3e-6)


@pytest.mark.parametrize("options", [("situ", 1.5, None), ("swiglu", None, None)])
def test_other_units_and_float32_weights(options) -> None:
    """Weights in float32 are rounded for the products; their gradients stay in float32."""
    args = operands(500, 256, 192, 6, 3, torch.bfloat16, weights=torch.float32)
    compare(args, *options)


@pytest.mark.parametrize("rows", sorted(configs.HALF))
def test_every_tile_that_can_be_chosen(rows, monkeypatch) -> None:
    monkeypatch.setattr(configs, "MANY", 0 if rows == 128 else 10**9)
    for dtype in (torch.bfloat16, torch.float16):
        compare(operands(900, 512, 640, 6, 3, dtype), "situ", 4.0, 25.0)
        compare(operands(130, 104, 72, 3, 2, dtype), "situ", 4.0, 25.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_expert_with_all_tokens_and_experts_with_none(dtype) -> None:
    args = operands(700, 256, 128, 6, 2, dtype, favourite=3, never=(0, 5))
    compare(args, "situ", 4.0, 25.0, floor=3e-6 if dtype == torch.float32 else 0.0)
    found = values_and_gradients(ours, args, "situ", 4.0, 25.0)
    assert all(not dw[e].any() for dw in found[3:] for e in (0, 5))


def test_no_tokens() -> None:
    args = [a[:0] if i < 3 else a for i, a in enumerate(operands(5, 64, 32, 4, 2, torch.bfloat16))]
    out, dz, dweight, *weights = values_and_gradients(ours, args, "situ", 4.0, 25.0)
    assert out.shape == dz.shape == (0, 64) and dweight.shape == (0, 2)
    assert all(not w.any() for w in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_t41_memory_that_held_nan_leaves_no_trace(dtype) -> None:
    """Rows of padding, and those beyond the tiles in use, are in every buffer and must be in no result."""
    args = operands(90, 256, 128, 40, 2, dtype)
    for _ in range(3):
        poison = [torch.full((n,), float("nan"), device="cuda") for n in (2**14, 2**16, 2**18, 2**20) for _ in range(4)]
        del poison
        assert all(x.isfinite().all() for x in values_and_gradients(ours, args, "situ", 4.0, 25.0))


def test_nan_stays_in_its_own_token() -> None:
    args = operands(400, 128, 64, 5, 2, torch.bfloat16)
    args[0][7, 3] = float("nan")
    with torch.no_grad():
        out = routed_experts(*args)
    assert out[7].isnan().all() and out[torch.arange(400, device="cuda") != 7].isfinite().all()


def test_saturated_units_have_finite_gradients() -> None:
    args = operands(300, 128, 64, 4, 2, torch.bfloat16)
    args[0] *= 1e4
    assert all(x.isfinite().all() for x in values_and_gradients(ours, args, "situ", 4.0, 25.0))


@pytest.mark.parametrize(("tokens", "count", "active", "tile"), [(5000, 896, 16, 128), (333, 7, 3, 64), (1, 3, 2, 64)])
def test_plan_is_a_stable_sort(tokens, count, active, tile) -> None:
    index = torch.rand(tokens, count, device="cuda").topk(active).indices
    plan = row_plan(index, count, tile)
    flat = index.flatten()
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=count)
    tiles = (counts + tile - 1) // tile
    start = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    assert torch.equal(plan.count_E.long(), counts) and torch.equal(plan.start_E1.long(), start)
    used = int(start[-1])
    assert torch.equal(plan.expert_T[:used].long(), torch.repeat_interleave(torch.arange(count, device="cuda"), tiles))
    within = torch.arange(len(flat), device="cuda") - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    assert torch.equal(plan.place_R[order].long(), start[flat[order]] * tile + within)
    assert torch.equal(plan.slot_R[plan.place_R.long()].long(), torch.arange(len(flat), device="cuda"))


def test_strided_tokens_and_gradients() -> None:
    """Tokens a stride apart are read in place; a gradient of another layout is taken as it is."""
    args = operands(200, 128, 64, 4, 2, torch.bfloat16)
    wide = torch.randn(200, 300, device="cuda").bfloat16()
    whole = routed_experts(wide[:, 8:136].contiguous(), *args[1:])
    assert torch.equal(routed_experts(wide[:, 8:136], *args[1:]), whole)
    leaf = args[0].clone().requires_grad_()
    expanded = torch.ones(1, 1, device="cuda").bfloat16().expand(200, 128)
    (dense,) = torch.autograd.grad(routed_experts(leaf, *args[1:]), leaf, expanded.contiguous())
    (strided,) = torch.autograd.grad(routed_experts(leaf, *args[1:]), leaf, expanded)
    assert torch.equal(dense, strided)
