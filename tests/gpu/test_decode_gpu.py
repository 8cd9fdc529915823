"""KDA decode and verify on a GPU against float64: every launch setting, pools, graphs, repeatability."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.kda.decode import kda_decode_step, select
from perilune.ops.kda.verify import Projections, kda_verify_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True, params=["cuda", "triton"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CUDA kernel, which leaves to Triton what it does not take, and Triton's."""
    with force(request.param):
        yield


GUARD = 256
HALVES = ("qkv_BX", "window_BXW1", "decay_logit_BHK", "beta_logit_BH", "gate_BHV")
# Each setting that `triton_decode.settings` can choose: 16 and 8 warps (with a cap on registers), 4 and fewer.
SHAPES = [  # B, H, K, V, W
    (1, 96, 128, 128, 4),
    (16, 96, 128, 128, 4),
    (3, 100, 128, 64, 4),
    (3, 4, 64, 64, 4),
    (2, 3, 32, 64, 4),
    (2, 2, 32, 32, 2),
    (3, 2, 20, 36, 3),
    (2, 1, 256, 256, 4),
    (2, 1, 8, 6, 1),
]


def relative_error(got: Tensor, truth: Tensor) -> float:
    got = got.double().to(truth.device)
    assert got.isfinite().all()
    return float((got - truth).norm() / truth.norm().clamp_min(1e-300))


def arguments(shape: tuple[int, ...], dtype: torch.dtype, slots: int | None = None) -> tuple[dict, list[Tensor]]:
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
        buffer = torch.full((count + 2 * GUARD,), float("nan"), dtype=dtype if name in HALVES else torch.float32)
        buffer[GUARD : GUARD + count] = (0.3 if name == "A_log_H" else 1.0) * torch.randn(count, generator=generator)
        buffers.append(buffer.cuda())
        views[name] = buffers[-1][GUARD : GUARD + count].view(size)
    return views, buffers


def exact(args: dict) -> dict:
    return {n: None if x is None else x.double() for n, x in args.items()}


def exact_step(args: dict, shape: tuple[int, ...], lower_bound: float | None = -5.0) -> Tensor:
    with force("torch"):
        return step(args, shape, lower_bound)


def step(args: dict, shape: tuple[int, ...], lower_bound: float | None = -5.0, index: Tensor | None = None) -> Tensor:
    _, heads, key_dim, _, _ = shape
    return kda_decode_step(
        **args, num_heads=heads, key_dim=key_dim, lower_bound=lower_bound, scale=key_dim**-0.5, norm_eps=1e-5,
        index_B=index,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_equal_float64_within_their_buffers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    lower_bound = -5.0 if dtype != torch.float16 else None
    args, buffers = arguments(shape, dtype)
    truth_args = exact(args)
    assert select("cuda", dtype).implementation in ("cuda", "triton")
    for _ in range(3):
        torch.cuda.empty_cache()
        got, truth = step(args, shape, lower_bound), exact_step(truth_args, shape, lower_bound)
        assert got.dtype == dtype
        assert relative_error(got, truth) < (3e-6 if dtype == torch.float32 else 4e-3)
    assert relative_error(args["state_BHVK"], truth_args["state_BHVK"]) < 1e-6
    assert torch.equal(args["window_BXW1"].double(), truth_args["window_BXW1"])
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all(), "wrote outside a tensor"


def test_steps_repeat_bit_for_bit() -> None:
    shape = (64, 96, 128, 128, 4)
    args, _ = arguments(shape, torch.bfloat16)
    copies = [{n: x.clone() for n, x in args.items()} for _ in range(3)]
    results = [step(copy, shape) for copy in copies]
    for result, copy in zip(results, copies, strict=True):
        assert torch.equal(result, results[0])
        assert torch.equal(copy["state_BHVK"], copies[0]["state_BHVK"])


def test_pool_with_padding_equals_the_plain_batch() -> None:
    shape = (5, 8, 128, 128, 4)
    for dtype in (torch.int32, torch.int64):
        pool, buffers = arguments(shape, torch.bfloat16, slots=9)
        pool["state_BHVK"][[1, 8]] = float("nan")  # of slots that no row names
        index = torch.tensor([5, -1, 0, 9, 3], dtype=dtype, device="cuda")
        chosen, before = [5, 0, 3], {n: pool[n].clone() for n in ("state_BHVK", "window_BXW1")}
        rows = [0, 2, 4]
        plain = {n: (x[chosen] if n in before else x[rows] if x.shape[0] == 5 else x).clone() for n, x in pool.items()}
        truth, got = step(plain, (3, *shape[1:])), step(pool, shape, index=index)
        assert torch.equal(got[rows], truth) and (got[1] == 0).all() and got[3].isnan().all()
        for name, old in before.items():
            assert torch.equal(pool[name][chosen], plain[name])
            rest = [slot for slot in range(9) if slot not in chosen]
            assert torch.equal(pool[name][rest].nan_to_num(7), old[rest].nan_to_num(7))
        assert all(buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all() for buffer in buffers)


def test_slices_of_a_fused_projection_are_read_in_place() -> None:
    shape = (4, 8, 128, 128, 4)
    args, _ = arguments(shape, torch.bfloat16)
    names = ("qkv_BX", "decay_logit_BHK", "beta_logit_BH", "gate_BHV")
    fused = torch.cat([args[n].flatten(1) for n in names], 1)
    parts = fused.split([args[n][0].numel() for n in names], 1)
    first, second = ({n: x.clone() for n, x in args.items()} for _ in range(2))
    second |= {n: part.unflatten(1, args[n].shape[1:]) for n, part in zip(names, parts, strict=True)}
    assert torch.equal(step(first, shape), step(second, shape))


def test_a_captured_step_replays() -> None:
    shape = (2, 96, 128, 128, 4)
    args, _ = arguments(shape, torch.bfloat16)
    plain = {n: x.clone() for n, x in args.items()}
    step({n: x.clone() for n, x in args.items()}, shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(args, shape)
    for _ in range(3):
        graph.replay()
        truth = step(plain, shape)
    torch.cuda.synchronize()
    assert torch.equal(out, truth) and torch.equal(args["state_BHVK"], plain["state_BHVK"])


@pytest.mark.parametrize("logit", [-1e30, -200.0, 200.0, 1e30])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_saturated_gates_are_finite(logit: float, lower_bound: float | None) -> None:
    shape = (1, 2, 128, 128, 4)
    args, _ = arguments(shape, torch.float32)
    for name in ("decay_logit_BHK", "beta_logit_BH", "gate_BHV"):
        args[name].fill_(logit)
    truth_args = exact(args)
    got, truth = step(args, shape, lower_bound), exact_step(truth_args, shape, lower_bound)
    assert args["state_BHVK"].isfinite().all() and float((got.double() - truth).abs().max()) < 1e-4


def window_case(batch: int, heads: int, size: int, pending: int, length: int, dtype: torch.dtype) -> dict:
    generator = torch.Generator().manual_seed(0)
    channels = 3 * heads * size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def projections(tokens: int) -> Projections:
        return Projections(
            normal(batch, tokens, channels), normal(batch, tokens, heads, size), normal(batch, tokens, heads)
        )

    return {
        "new": projections(length), "gate": normal(batch, length, heads, size), "pending": projections(pending),
        "conv_weight": normal(channels, 4).float(), "window": normal(batch, channels, 3),
        "A_log": 0.3 * normal(heads).float(), "dt_bias": normal(heads * size).float(), "norm_weight": normal(size).float(),
        "state": normal(batch, heads, size, size).float(),
    }  # fmt: skip


def moved(case: dict, *to) -> dict:
    return {
        name: Projections(*(part.to(*to, copy=True) for part in x))
        if isinstance(x, Projections)
        else x.to(*to, copy=True)
        for name, x in case.items()
    }


def verify(case: dict, counts: Tensor | None, heads: int, size: int) -> Tensor:
    return kda_verify_step(
        case["new"], case["gate"], None if counts is None else case["pending"], counts, case["conv_weight"], case["window"],
        case["A_log"], case["dt_bias"], case["norm_weight"], case["state"], num_heads=heads, key_dim=size,
        lower_bound=-5.0, scale=size**-0.5, norm_eps=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("size", [128, 64, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_equals_plain_decoding_for_every_count(size: int, dtype: torch.dtype) -> None:
    """Rows that accept 0 to 9 of 9 tokens, in one call; the truth is a decode step a token in float64."""
    heads, case = 3, window_case(10, 3, size, 9, 9, dtype)
    counts = torch.arange(10)
    here, there = moved(case, "cuda"), moved(case, torch.float64)
    got, truth = verify(here, counts.cuda(), heads, size), verify(there, counts, heads, size)
    assert relative_error(got, truth) < (3e-6 if dtype == torch.float32 else 4e-3)
    assert relative_error(here["state"], there["state"]) < 1e-6
    assert torch.equal(here["window"].double().cpu(), there["window"])
    assert torch.equal(here["state"][0].cpu(), case["state"][0]), "nothing accepted, nothing written"


def test_verify_repeats_and_agrees_with_the_step_by_step_form_on_the_device() -> None:
    heads, size = 96, 128
    case = moved(window_case(2, heads, size, 8, 9, torch.bfloat16), "cuda")
    counts = torch.tensor([8, 5], device="cuda")
    runs = [moved(case, "cuda") for _ in range(3)]
    outputs = [verify(run, counts, heads, size) for run in runs[:2]]
    with force("torch"):
        outputs.append(verify(runs[2], counts, heads, size))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(runs[0]["state"], runs[1]["state"])
    assert relative_error(outputs[0], outputs[2].double().cpu()) < 4e-3
    assert relative_error(runs[0]["state"], runs[2]["state"].double().cpu()) < 1e-6


def test_t06_counts_out_of_range_and_none_accepted() -> None:
    heads, size = 2, 128
    case = moved(window_case(4, heads, size, 4, 3, torch.bfloat16), "cuda")
    before = moved(case, "cuda")
    case["state"][1] = float("nan")
    got = verify(case, torch.tensor([0, 2, 5, -1], device="cuda"), heads, size)
    assert got[0].isfinite().all() and got[1:].isnan().all()
    assert torch.equal(case["state"][[0, 2, 3]], before["state"][[0, 2, 3]])
    assert torch.equal(case["window"][[0, 2, 3]], before["window"][[0, 2, 3]])
