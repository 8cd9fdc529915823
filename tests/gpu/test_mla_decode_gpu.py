"""Absorbed attention on a GPU against float64: every launch setting, ragged lengths, pages, guard bands, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.mla import attend_cached, attend_latent, decode, device, triton_decode
from perilune.ops.mla.kernel_choice import PAGE
from perilune.ops.mla.triton_decode import TILINGS, Tiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GUARD = 4096
SCALE = 192**-0.5
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SHAPES = [  # B, T, H, L, r, lengths, room
    (1, 1, 12, 512, 64, (4096,), 4096),
    (3, 1, 48, 512, 64, (1, 1000, 2049), 2304),
    (2, 1, 96, 512, 64, (700, 4095), 4096),
    (4, 1, 32, 512, 0, (0, 64, 65, 333), 384),
    (5, 1, 64, 512, 64, (0, 64, 128, 129, 4000), 4096),
    (2, 4, 12, 512, 64, (4, 777), 1024),
    (2, 9, 16, 512, 64, (9, 2000), 2048),
    (3, 1, 4, 64, 16, (1, 63, 300), 320),
    (2, 2, 5, 24, 6, (3, 200), 256),
]


def guarded(x: Tensor) -> Tensor:
    """A copy amid NaN on both sides."""
    buffer = torch.full((x.numel() + 2 * GUARD,), torch.nan, dtype=x.dtype, device="cuda")
    buffer[GUARD:-GUARD] = x.flatten()
    return buffer[GUARD:-GUARD].view(x.shape)


def operands(shape: tuple, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of `attend_cached` amid NaN; the cache is NaN beyond each length."""
    batch, tokens, heads, width, extra, lengths, room = shape
    torch.manual_seed(0)

    def randn(*size: int) -> Tensor:
        return guarded(torch.randn(*size).to(dtype))

    inputs = {
        "q_nope_BTHn": randn(batch, tokens, heads, 128), "q_rope_BTHr": randn(batch, tokens, heads, extra),
        "cache_BSC": randn(batch, room, width + extra), "w_uk_HnL": randn(heads, 128, width),
        "w_uv_HvL": randn(heads, 128, width), "length_B": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    }  # fmt: skip
    for name in ("w_uk_HnL", "w_uv_HvL"):
        inputs[name] *= inputs[name].shape[2 if name == "w_uv_HvL" else 1] ** -0.5
    for row, length in enumerate(lengths):
        inputs["cache_BSC"][row, length:] = torch.nan
    return inputs


def truth(inputs: dict[str, Tensor]) -> Tensor:
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    with force("torch"):
        return attend_cached(**wide, scale=SCALE)


def error(got: Tensor, right: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - right).norm() / right.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_float64_and_repeats(shape: tuple, dtype: torch.dtype) -> None:
    inputs = operands(shape, dtype)
    in_cuda = dtype == torch.bfloat16 and shape[3] == 512
    chosen = decode.select(inputs["q_nope_BTHn"], inputs["cache_BSC"], inputs["w_uk_HnL"])
    assert chosen.implementation == ("cuda" if in_cuda else "triton"), chosen.reason
    right = truth(inputs)
    got = attend_cached(**inputs, scale=SCALE)
    assert got.dtype == dtype and error(got, right) < TOLERANCE[dtype]
    assert torch.equal(got, attend_cached(**inputs, scale=SCALE))
    with force("torch"):
        assert error(got, right) <= 1.5 * error(attend_cached(**inputs, scale=SCALE), right) + 1e-6, "worse than torch"


@pytest.mark.parametrize("tile", TILINGS, ids=str)
@pytest.mark.parametrize("splits", [1, 40])
def test_every_setting(tile: Tiling, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "pieces", lambda *_: splits)
    monkeypatch.setattr(triton_decode, "tiling", lambda *_: tile)
    for shape in SHAPES[1], SHAPES[5]:
        inputs = operands(shape, torch.bfloat16)
        with force("triton"):
            got = attend_cached(**inputs, scale=SCALE)
        assert error(got, truth(inputs)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("runs", [1, 2, 7, 132, 200])
def test_cuda_in_any_number_of_runs(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "runs_of", lambda *_: runs)
    for shape in SHAPES[:7]:
        inputs = operands(shape, torch.bfloat16)
        with force("cuda"):
            got = attend_cached(**inputs, scale=SCALE)
        assert error(got, truth(inputs)) < TOLERANCE[torch.bfloat16], shape


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@pytest.mark.parametrize("page", [PAGE, 2 * PAGE])
@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_pages_give_the_same_bits(shape: tuple, page: int, implementation: str) -> None:
    inputs = operands(shape, torch.bfloat16)
    batch, room, width = inputs["cache_BSC"].shape
    count = room // page
    number = torch.randperm(2 * batch * count, device="cuda")[: batch * count]
    pool = torch.full((2 * batch * count, page + PAGE, width), torch.nan, device="cuda", dtype=torch.bfloat16)
    pages = pool[:, PAGE:]
    pages[number] = inputs["cache_BSC"].view(-1, page, width)
    table = number.view(batch, count).int()
    table[torch.arange(count, device="cuda") * page >= inputs["length_B"][:, None]] = -1
    paged = inputs | {"cache_BSC": pages, "table_BP": table}
    with force(implementation):
        assert torch.equal(attend_cached(**paged, scale=SCALE), attend_cached(**inputs, scale=SCALE))


def test_a_cut_cache_equals_the_expanded_form() -> None:
    inputs = operands((2, 3, 48, 512, 64, (1500, 1500), 1500), torch.bfloat16)
    parts = inputs["cache_BSC"].split((512, 64), -1)
    names = ("q_nope_BTHn", "q_rope_BTHr", "w_uk_HnL", "w_uv_HvL")
    q, q_rope, w_uk, w_uv = (inputs[n] for n in names)
    got = attend_latent(q, q_rope, *parts, w_uk, w_uv, SCALE, past=1497)
    assert error(got, truth(inputs)) < TOLERANCE[torch.bfloat16]


def test_many_sequences_of_any_length() -> None:
    """More than a warp holds at once, by pages."""
    batch, count = 150, 20
    torch.manual_seed(1)
    lengths = [0, 1, 64, 65, *torch.randint(1, count * PAGE, (batch - 4,)).tolist()]
    inputs = operands((batch, 1, 48, 512, 64, lengths, count * PAGE), torch.bfloat16)
    number = torch.randperm(batch * count, device="cuda")
    pages = torch.empty(batch * count, PAGE, 576, device="cuda", dtype=torch.bfloat16)
    pages[number] = inputs["cache_BSC"].view(-1, PAGE, 576)
    got = attend_cached(**inputs | {"cache_BSC": pages, "table_BP": number.view(batch, count).int()}, scale=SCALE)
    right = torch.cat(
        [truth({n: x if n.startswith("w_") else x[i : i + 1] for n, x in inputs.items()}) for i in range(batch)]
    )
    assert error(got, right) < TOLERANCE[torch.bfloat16]
    worst = ((got.double() - right).norm(dim=(2, 3)) / right.norm(dim=(2, 3)).clamp_min(1e-30))[1:].max()
    assert worst < 3 * TOLERANCE[torch.bfloat16]


def test_a_captured_step_replays_with_growing_lengths() -> None:
    inputs = operands((3, 1, 48, 512, 64, (2048, 2048, 2048), 2048), torch.bfloat16)
    lengths = inputs["length_B"]
    lengths.copy_(torch.tensor([1, 63, 1000]))
    attend_cached(**inputs, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_cached(**inputs, scale=SCALE)
    for _ in range(4):
        graph.replay()
        torch.cuda.synchronize()
        assert error(out, truth(inputs)) < TOLERANCE[torch.bfloat16]
        lengths += 257


@pytest.mark.parametrize("heads", [16, 48])
def test_nan_in_a_seen_row_shows(heads: int) -> None:
    inputs = operands((1, 1, heads, 512, 64, (500,), 512), torch.bfloat16)
    inputs["cache_BSC"][0, 499, 3] = torch.nan
    assert attend_cached(**inputs, scale=SCALE).isnan().all()


@pytest.mark.parametrize("heads", [16, 48])
def test_t49_rows_beyond_32_bit_offsets(heads: int) -> None:
    """The last rows of a cache of more than 2^31 numbers equal those of a short one."""
    room = (1 << 31) // 576 + 4096
    cache = torch.zeros(1, room, 576, device="cuda", dtype=torch.bfloat16)
    inputs = operands((1, 1, heads, 512, 64, (2048,), 2048), torch.bfloat16)
    cache[:, -2048:] = inputs["cache_BSC"]
    short = attend_cached(**inputs, scale=SCALE)
    pages = cache[:, -(room // 64) * 64 :].view(-1, 64, 576)
    table = torch.arange(len(pages) - 32, len(pages), device="cuda", dtype=torch.int32)[None]
    assert torch.equal(attend_cached(**inputs | {"cache_BSC": pages, "table_BP": table}, scale=SCALE), short)
    inputs["cache_BSC"], inputs["length_B"] = cache, torch.tensor([room], dtype=torch.int32, device="cuda")
    long = attend_cached(**inputs, scale=SCALE)
    zeros = room - 2048  # zero rows score 0 and add nothing to the sum
    with force("torch"):
        right = attend_cached(**inputs, scale=SCALE)
    assert zeros > 0 and error(long, right.double()) < 2e-2
