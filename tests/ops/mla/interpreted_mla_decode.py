"""The kernels of absorbed attention against plain torch in float64: tiles, lengths, pages, several new tokens, guard bands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.mla import attend_cached, attend_latent, decode, latent, triton_decode
from perilune.ops.mla.kernel_choice import PAGE
from perilune.ops.mla.triton_decode import Tiling
from perilune.ops.mla.triton_project import project

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TILES = Tiling(16, 16, 4, 2), Tiling(16, 32, 4, 2)
CASES = [  # B, T, H, L, r, lengths, room
    (1, 1, 4, 64, 16, (37,), 40),
    (3, 1, 3, 64, 16, (1, 64, 0), 70),
    (2, 3, 7, 32, 0, (3, 61), 64),
    (2, 2, 4, 24, 6, (5, 50), 60),
]


def operands(case: tuple, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of `attend_cached`; the cache is NaN beyond each length."""
    batch, tokens, heads, width, extra, lengths, room = case
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    cache = randn(batch, room, width + extra)
    for row, length in enumerate(lengths):
        cache[row, length:] = torch.nan
    return {
        "q_nope_BTHn": randn(batch, tokens, heads, 12), "q_rope_BTHr": randn(batch, tokens, heads, extra), "cache_BSC": cache,
        "w_uk_HnL": randn(heads, 12, width) / 4, "w_uv_HvL": randn(heads, 8, width) / 4,
        "length_B": torch.tensor(lengths, dtype=torch.int32),
    }  # fmt: skip


def truth(inputs: dict[str, Tensor]) -> Tensor:
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    with force("torch"):
        return attend_cached(**wide, scale=0.2)


def paged(inputs: dict[str, Tensor], page: int) -> dict[str, Tensor]:
    """The same caches as shuffled pages of a pool, amid NaN."""
    batch, room, width = inputs["cache_BSC"].shape
    count = -(-room // page)
    cache = torch.full((batch, count * page, width), torch.nan, dtype=inputs["cache_BSC"].dtype)
    cache[:, :room] = inputs["cache_BSC"]
    number = torch.randperm(2 * batch * count, generator=torch.Generator().manual_seed(1))[: batch * count]
    pages = torch.full((2 * batch * count, page + PAGE, width), torch.nan, dtype=cache.dtype)[:, PAGE:]
    pages[number] = cache.view(batch * count, page, width)
    return inputs | {"cache_BSC": pages, "table_BP": number.view(batch, count).int()}


def close(got: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "dtype", "tile"),
    [*((case, torch.float32, TILES[n % 2]) for n, case in enumerate(CASES)), (CASES[1], torch.float16, TILES[0])],
    ids=str,
)
def test_ragged_lengths_and_pages(
    case: tuple, dtype: torch.dtype, tile: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_decode, "tiling", lambda *_: tile)
    inputs = operands(case, dtype)
    right = truth(inputs)
    with force("triton"):
        assert decode.select(inputs["q_nope_BTHn"], inputs["cache_BSC"], inputs["w_uk_HnL"]).implementation == "triton"
        for splits in (1, 3):
            monkeypatch.setattr(triton_decode, "pieces", lambda *_, n=splits: n)
            got = attend_cached(**inputs, scale=0.2)
            close(got, right, dtype)
            page = PAGE if splits == 1 else 2 * PAGE
            assert torch.equal(got, attend_cached(**paged(inputs, page), scale=0.2)), "pages hold the same rows"


def test_a_cut_cache_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one cache, more new tokens than fit into a tile, and more pieces than tiles of cached tokens."""
    monkeypatch.setattr(triton_decode, "tiling", lambda *_: TILES[1])
    inputs = operands((1, 6, 5, 32, 16, (200,), 200), torch.float32)
    parts = inputs["cache_BSC"].split((32, 16), -1)
    right = truth(inputs)
    arguments = (inputs["q_nope_BTHn"], inputs["q_rope_BTHr"], *parts, inputs["w_uk_HnL"], inputs["w_uv_HvL"], 0.2)
    with force("triton"):
        assert latent.select(arguments[0], parts[0], arguments[4]).implementation == "triton"
        close(attend_latent(*arguments, past=194), right, torch.float32)
        query = torch.einsum("bthn,hnl->bthl", arguments[0], arguments[4]).flatten(1, 2)
        few, many = (triton_decode.context(query, arguments[1], *parts, 0.2, splits=n) for n in (1, 9))
        torch.testing.assert_close(few, many, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sizes", [(3, 2, 24, 40), (17, 2, 130, 70)])  # tokens, heads, depth, columns
def test_products_with_a_matrix_of_each_head(sizes: tuple) -> None:
    tokens, heads, depth, columns = sizes
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, depth + 8, generator=draw)[..., :depth]
    w = torch.randn(heads, columns, depth, generator=draw).mT
    right = torch.einsum("nhk,hko->nho", x.double(), w.double())
    torch.testing.assert_close(project(x, w).double(), right, rtol=1e-5, atol=2e-5)


def test_what_the_kernels_do_not_take_is_said() -> None:
    q, cache, weight = torch.zeros(1, 1, 2, 4), torch.zeros(1, 8, 1040), torch.zeros(2, 4, 1024)
    with force("triton"):
        assert "at most 512" in decode.select(q, cache, weight).reason
        assert "gradient" in decode.select(q.requires_grad_(), cache, weight[..., :64]).reason
        assert "float64" in decode.select(q.double(), cache.double(), weight.double()).reason
    assert decode.select(q, cache, weight).implementation == "torch"


@pytest.mark.parametrize(
    ("batch", "tiles", "steps", "count"),
    [(1, 1, 2048, 126), (16, 1, 512, 8), (16, 2, 512, 4), (100, 1, 64, 9), (1, 1, 3, 3)],
)
def test_pieces_fill_the_device(batch: int, tiles: int, steps: int, count: int) -> None:
    assert triton_decode.pieces(batch, tiles, steps, 132) == count
