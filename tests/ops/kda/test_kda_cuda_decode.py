"""The CUDA decode kernel, emulated on the CPU, against the torch form in float64: gates, sizes, pools, guard bands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.kda.cuda import decode as cuda
from perilune.ops.kda.decode import kda_decode_step, select
from perilune.ops.kda.decode_pages import kda_decode_pages
from perilune.ops.linear import linear

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

HALVES = ("qkv_BX", "window_BXW1", "decay_logit_BHK", "beta_logit_BH", "gate_BHV")
SHAPES = [(2, 3, 128, 128, 4), (1, 1, 64, 64, 4), (3, 2, 64, 128, 2), (1, 2, 128, 64, 3)]  # B, H, K, V, W
GUARD = 64


def arguments(shape: tuple[int, ...], slots: int | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Tensors amid NaN on both sides, and the buffers that hold them."""
    batch, heads, key_dim, value_dim, taps = shape
    slots = batch if slots is None else slots
    channels = heads * (2 * key_dim + value_dim)
    shapes = {
        "qkv_BX": (batch, channels), "conv_weight_XW": (channels, taps), "window_BXW1": (slots, channels, taps - 1),
        "decay_logit_BHK": (batch, heads, key_dim), "A_log_H": (heads,), "dt_bias": (heads * key_dim,),
        "beta_logit_BH": (batch, heads), "gate_BHV": (batch, heads, value_dim), "norm_weight_V": (value_dim,),
        "state_BHVK": (slots, heads, value_dim, key_dim),
    }  # fmt: skip
    generator, views, buffers = torch.Generator().manual_seed(0), {}, []
    for name, size in shapes.items():
        count = torch.Size(size).numel()
        kind = torch.bfloat16 if name in HALVES else torch.float32
        buffers.append(torch.full((count + 2 * GUARD,), float("nan"), dtype=kind))
        views[name] = buffers[-1][GUARD : GUARD + count].view(size)
        views[name].copy_(torch.randn(size, generator=generator))
    return views, buffers


def step(args: dict[str, Tensor], implementation: str, lower_bound: float | None = -5.0, **more: Tensor) -> Tensor:
    _, heads, _, key_dim = args["state_BHVK"].shape
    with force(implementation), emulated():
        return kda_decode_step(
            **args, num_heads=heads, key_dim=key_dim, lower_bound=lower_bound, scale=key_dim**-0.5, norm_eps=1e-5, **more
        )  # fmt: skip


def exact(args: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in args.items()}


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("shape", "lower_bound"), [*((shape, -5.0) for shape in SHAPES), (SHAPES[1], None)])
def test_steps_equal_float64_within_their_buffers(shape: tuple[int, ...], lower_bound: float | None) -> None:
    args, buffers = arguments(shape)
    truth_args = exact(args)
    with emulated():
        assert cuda.unsuitable(args["qkv_BX"], args["window_BXW1"], args["state_BHVK"], shape[-1]) is None
    for _ in range(2):
        got, truth = step(args, "cuda", lower_bound), step(truth_args, "torch", lower_bound)
        assert error(got, truth) < 3e-3  # the output is rounded to bfloat16
        assert error(args["state_BHVK"], truth_args["state_BHVK"]) < 1e-6
        assert torch.equal(args["window_BXW1"].double(), truth_args["window_BXW1"])
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pools_padding_and_slots_outside(dtype: torch.dtype) -> None:
    shape = (4, 2, 64, 64, 4)
    args, _ = arguments(shape, slots=6)
    before = {name: x.clone() for name, x in args.items()}
    truth_args = exact(args)
    got = step(args, "cuda", index_B=torch.tensor([5, -1, 6, 2], dtype=dtype))
    truth = step(truth_args, "torch", index_B=torch.tensor([5, -1, -1, 2], dtype=dtype))
    assert error(got[[0, 3]], truth[[0, 3]]) < 3e-3
    assert torch.equal(got[1], torch.zeros_like(got[1])) and got[2].isnan().all()
    assert error(args["state_BHVK"], truth_args["state_BHVK"]) < 1e-6
    for slot in (0, 1, 3, 4):
        assert torch.equal(args["state_BHVK"][slot], before["state_BHVK"][slot])


def test_the_order_of_warps_and_the_number_of_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 3, 128, 128, 4)
    results = []
    for blocks, backwards in ((1, False), (4, True), (6, False)):
        args, _ = arguments(shape)
        monkeypatch.setattr(cuda, "units", lambda device, blocks=blocks: blocks)
        with emulated(backwards):
            heads, key_dim = 3, 128
            out = cuda.decode_step(*args.values(), None, heads, key_dim, -5.0, 0.1, 1e-5)
        results.append((out, args["state_BHVK"], args["window_BXW1"]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_states_in_pages_of_a_pool() -> None:
    """Pages with the heads one behind the other, matrix and window of each: as a serving engine keeps them."""
    shape = (2, 2, 64, 64, 4)
    args, _ = arguments(shape)
    _, heads, key_dim, value_dim, taps = shape
    pages, taps = 5, taps - 1
    matrix, window = 4 * key_dim * value_dim, 2 * taps * (2 * key_dim + value_dim)
    pool = torch.zeros(pages, 3, heads * (matrix + window) + 160, dtype=torch.uint8)
    head_bytes = pool[:, 1, : heads * (matrix + window)].unflatten(-1, (heads, -1))
    states = head_bytes[..., :matrix].view(torch.float32).unflatten(-1, (value_dim, key_dim))
    windows = head_bytes[..., matrix:].view(torch.bfloat16)
    page_B = torch.tensor([3, 1])
    states[page_B] = args["state_BHVK"]
    parts = args["window_BXW1"].flatten(1).split([heads * key_dim * taps] * 2 + [heads * value_dim * taps], 1)
    windows[page_B] = torch.cat([part.unflatten(1, (heads, -1)) for part in parts], -1)
    truth = step(exact(args), "torch")
    before = pool.clone()
    with force("cuda"), emulated():
        names = ("decay_logit_BHK", "A_log_H", "dt_bias", "beta_logit_BH", "gate_BHV", "norm_weight_V")
        got = kda_decode_pages(
            args["qkv_BX"], args["conv_weight_XW"], windows, *(args[name] for name in names), states, page_B,
            num_heads=heads, key_dim=key_dim, lower_bound=-5.0, scale=key_dim**-0.5, norm_eps=1e-5,
        )  # fmt: skip
    step(args, "cuda")
    assert got is not None and error(got, truth) < 3e-3
    assert torch.equal(states[page_B], args["state_BHVK"])
    after = args["window_BXW1"].flatten(1).split([heads * key_dim * taps] * 2 + [heads * value_dim * taps], 1)
    assert torch.equal(windows[page_B], torch.cat([part.unflatten(1, (heads, -1)) for part in after], -1))
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]]) and torch.equal(pool[:, [0, 2]], before[:, [0, 2]])


@pytest.mark.parametrize(("shape", "rank"), [((2, 2, 64, 64, 4), 64), ((1, 1, 128, 64, 4), 96)])
@torch.no_grad()
def test_the_decay_s_product_within_the_kernel_has_the_bits_of_the_one_before_it(shape: tuple, rank: int) -> None:
    batch, heads, key_dim, value_dim, _ = shape
    args, _ = arguments(shape)
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(batch, rank + 8, generator=generator).bfloat16()[:, :rank]
    up = (torch.randn(heads * key_dim, rank, generator=generator) / rank**0.5).bfloat16()
    windows = args["window_BXW1"].flatten(1).unflatten(1, (heads, -1)).contiguous()  # some window
    states = args["state_BHVK"].clone()
    outs = []
    for backwards in (False, True):
        for inside in (True, False):
            with force("cuda"), emulated(backwards):
                assert cuda.projects(low, up)
                decay = (low, {"decay_up_OR": up}) if inside else (linear(low, up), {})
                names = ("A_log_H", "dt_bias", "beta_logit_BH", "gate_BHV", "norm_weight_V")
                pools = windows.clone(), states.clone()
                out = kda_decode_pages(
                    args["qkv_BX"], args["conv_weight_XW"], pools[0], decay[0], *(args[name] for name in names), pools[1],
                    torch.arange(batch), num_heads=heads, key_dim=key_dim, lower_bound=-5.0, scale=0.1, norm_eps=1e-5,
                    **decay[1],
                )  # fmt: skip
                outs.append((out, *pools))
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


def test_nan_stays_in_its_row_and_head() -> None:
    shape = (2, 2, 64, 64, 4)
    args, _ = arguments(shape)
    args["decay_logit_BHK"][1, 0, 3] = float("nan")
    got = step(args, "cuda", None).view(2, 2, 64)
    assert got[1, 0].isnan().all() and args["state_BHVK"][1, 0, :, 3].isnan().all()
    assert got[0].isfinite().all() and got[1, 1].isfinite().all()


def test_what_the_kernel_does_not_take_is_said() -> None:
    args, _ = arguments((1, 1, 64, 64, 4))
    with emulated():
        assert "bfloat16" in str(cuda.why_not(torch.device("cpu"), torch.float32))
        narrow = args["state_BHVK"][..., :32]
        assert "64 or 128" in str(cuda.unsuitable(args["qkv_BX"], args["window_BXW1"], narrow, 4))
        with force("cuda"):
            assert select("cpu", torch.bfloat16).implementation == "cuda"
    with force("cuda"):
        assert select("cpu", torch.bfloat16).implementation != "cuda"
