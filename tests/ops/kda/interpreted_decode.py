"""The decode kernel against the torch form in float64: layouts, gates, pools, guard bands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda.decode import kda_decode_step, select

SHAPES = [  # B, H, K, V, W
    (1, 2, 64, 64, 4),
    (2, 2, 20, 36, 4),
    (2, 1, 8, 6, 3),
    (1, 2, 16, 16, 1),
    (2, 1, 5, 7, 6),
    (2, 1, 128, 128, 4),
]
GUARD = 64


def relative_error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-300))


def guarded(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A tensor amid NaN on both sides, and the whole buffer."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * GUARD,), float("nan"))
    view = buffer[GUARD : GUARD + size].view(shape)
    view.copy_(torch.randn(shape))
    return view, buffer


def arguments(shape: tuple[int, ...], slots: int | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
    batch, heads, key_dim, value_dim, taps = shape
    slots = batch if slots is None else slots
    channels = heads * (2 * key_dim + value_dim)
    shapes = {
        "qkv_BX": (batch, channels),
        "conv_weight_XW": (channels, taps),
        "window_BXW1": (slots, channels, taps - 1),
        "decay_logit_BHK": (batch, heads, key_dim),
        "A_log_H": (heads,),
        "dt_bias": (heads * key_dim,),
        "beta_logit_BH": (batch, heads),
        "gate_BHV": (batch, heads, value_dim),
        "norm_weight_V": (value_dim,),
        "state_BHVK": (slots, heads, value_dim, key_dim),
    }
    pairs = {name: guarded(shape) for name, shape in shapes.items()}
    return {name: view for name, (view, _) in pairs.items()}, [buffer for _, buffer in pairs.values()]


def numbers(shape: tuple[int, ...], lower_bound: float | None = -5.0) -> dict:
    _, heads, key_dim, _, _ = shape
    return {
        "num_heads": heads, "key_dim": key_dim, "lower_bound": lower_bound, "scale": key_dim**-0.5, "norm_eps": 1e-5,
    }  # fmt: skip


def step(implementation: str, args: dict[str, Tensor], shape: tuple[int, ...], **more) -> Tensor:
    with force(implementation):
        return kda_decode_step(**args, **numbers(shape, more.pop("lower_bound", -5.0)), **more)


def copied(args: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: x.to(dtype, copy=True) for name, x in args.items()}


@pytest.mark.parametrize(("shape", "lower_bound"), list(zip(SHAPES, [-5.0, None] * 3, strict=True)))
def test_equals_float64_and_stays_within_its_buffers(shape: tuple[int, ...], lower_bound: float | None) -> None:
    torch.manual_seed(0)
    args, buffers = arguments(shape)
    exact = copied(args, torch.float64)
    for _ in range(2):
        got = step("triton", args, shape, lower_bound=lower_bound)
        truth = step("torch", exact, shape, lower_bound=lower_bound)
        assert relative_error(got, truth) < 3e-6
        args["qkv_BX"].copy_(args["qkv_BX"].flip(0) * 0.7)
        exact["qkv_BX"].copy_(args["qkv_BX"])
    assert relative_error(args["state_BHVK"], exact["state_BHVK"]) < 1e-6
    assert torch.equal(args["window_BXW1"].double(), exact["window_BXW1"])
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all(), "wrote outside a tensor"


@pytest.mark.parametrize("missing", ["A_log_H", "dt_bias"])
def test_absent_parameters(missing: str) -> None:
    shape = SHAPES[1]
    args = arguments(shape)[0] | {missing: None}
    exact = {n: None if x is None else x.double() for n, x in args.items()}
    assert relative_error(step("triton", args, shape), step("torch", exact, shape)) < 3e-6


def test_half_precision_activations_and_window() -> None:
    shape = (2, 2, 16, 24, 4)
    args, _ = arguments(shape)
    halves = ("qkv_BX", "window_BXW1", "decay_logit_BHK", "beta_logit_BH", "gate_BHV")
    args = {n: x.half() if n in halves else x.clone() for n, x in args.items()}
    exact = copied(args, torch.float64)
    got, truth = step("triton", args, shape), step("torch", exact, shape)
    assert got.dtype == torch.float16 and relative_error(got, truth) < 1e-3
    assert relative_error(args["state_BHVK"], exact["state_BHVK"]) < 1e-6
    assert torch.equal(args["window_BXW1"].double(), exact["window_BXW1"])


def test_slices_of_a_fused_projection() -> None:
    batch, heads, key_dim, value_dim, taps = shape = (3, 2, 16, 24, 4)
    args, _ = arguments(shape)
    names = ("qkv_BX", "decay_logit_BHK", "beta_logit_BH", "gate_BHV")
    fused = torch.cat([args[n].flatten(1) for n in names], 1)
    parts = fused.split([args[n][0].numel() for n in names], 1)
    views = {n: part.unflatten(1, args[n].shape[1:]) for n, part in zip(names, parts, strict=True)}
    assert not views["gate_BHV"].is_contiguous()
    first, second = copied(args), copied(args) | views
    assert torch.equal(step("triton", first, shape), step("triton", second, shape))
    assert torch.equal(first["state_BHVK"], second["state_BHVK"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pool_rows_are_those_of_the_plain_batch(dtype: torch.dtype) -> None:
    shape = (4, 1, 16, 24, 4)
    pool, _ = arguments(shape, slots=7)
    index = torch.tensor([5, -1, 0, 3], dtype=dtype)
    before = copied(pool)
    chosen = index.clamp(min=0).long()
    plain = copied(pool) | {n: pool[n][chosen].clone() for n in ("window_BXW1", "state_BHVK")}
    truth, got = step("triton", plain, shape), step("triton", pool, shape, index_B=index)
    alive = index >= 0
    assert torch.equal(got[alive], truth[alive]) and (got[~alive] == 0).all()
    for name in ("window_BXW1", "state_BHVK"):
        assert torch.equal(pool[name][chosen[alive]], plain[name][alive])
        untouched = [1, 2, 4, 6]
        assert torch.equal(pool[name][untouched], before[name][untouched])


def test_t06_padding_beside_a_poisoned_neighbour() -> None:
    """A row marked -1 must not read or write the slot that an address before the pool's start would hit."""
    shape = (2, 1, 8, 8, 4)
    pool, buffers = arguments(shape, slots=2)
    pool["state_BHVK"][0] = float("nan")
    before = copied(pool)
    got = step("triton", pool, shape, index_B=torch.tensor([-1, 1]))
    assert (got[0] == 0).all() and got[1].isfinite().all()
    assert pool["state_BHVK"][0].isnan().all() and torch.equal(pool["window_BXW1"][0], before["window_BXW1"][0])
    assert all(buffer[:GUARD].isnan().all() for buffer in buffers)


def test_a_slot_outside_the_pool_is_loud() -> None:
    shape = (2, 1, 8, 8, 4)
    pool, _ = arguments(shape, slots=3)
    before = pool["state_BHVK"].clone()
    got = step("triton", pool, shape, index_B=torch.tensor([3, 1]))
    assert got[0].isnan().all() and got[1].isfinite().all()
    assert torch.equal(pool["state_BHVK"][[0, 2]], before[[0, 2]])
    with pytest.raises(ConfigError, match="slot 3 of a pool of 3"):
        step("torch", pool, shape, index_B=torch.tensor([3, 1]))
    with pytest.raises(ConfigError, match=r"\[1\].*2 rows"):
        step("triton", pool, shape, index_B=torch.tensor([1]))


def test_nan_stays_in_its_row_and_head() -> None:
    shape = (3, 2, 16, 24, 4)
    args, _ = arguments(shape)
    poisoned = copied(args)
    poisoned["decay_logit_BHK"][1, 1, 3] = float("nan")
    good, bad = (step("triton", x, shape).view(3, 2, 24) for x in (args, poisoned))
    assert bad[1, 1].isnan().all()
    bad[1, 1] = good[1, 1]
    assert torch.equal(bad, good)


@pytest.mark.parametrize("logit", [-1e30, 200.0])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_saturated_gates_are_finite(logit: float, lower_bound: float | None) -> None:
    shape = (1, 1, 16, 16, 4)
    args, _ = arguments(shape)
    for name in ("decay_logit_BHK", "beta_logit_BH", "gate_BHV"):
        args[name].fill_(logit)
    exact = copied(args, torch.float64)
    got, truth = (
        step("triton", args, shape, lower_bound=lower_bound),
        step("torch", exact, shape, lower_bound=lower_bound),
    )
    assert got.isfinite().all() and args["state_BHVK"].isfinite().all()
    assert float((got.double() - truth).abs().max()) < 1e-5


def test_select_says_why() -> None:
    with force("triton"):
        assert select("cpu", torch.float16).implementation == "triton"
        assert "not float64" in select("cpu", torch.float64).reason
    with force("native"):
        assert select("cuda", torch.float32) == ("torch", "plain torch: the native kernel runs on the CPU, not on cuda")
    assert "not on meta" in select("meta", torch.float32).reason


def test_a_layout_that_the_kernel_does_not_read_takes_the_torch_form() -> None:
    shape = (2, 2, 16, 24, 4)
    args, _ = arguments(shape)
    spread = copied(args)
    spread["state_BHVK"] = torch.stack([args["state_BHVK"]] * 2, -1)[..., 0]
    assert not spread["state_BHVK"].is_contiguous()
    got, truth = step("triton", spread, shape), step("torch", copied(args), shape)
    torch.testing.assert_close(got, truth)
