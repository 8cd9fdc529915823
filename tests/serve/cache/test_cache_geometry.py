"""Page sizes against the published figures, and head-wise layouts against plain array slicing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.config.presets import PRESETS, k2_nano, k3, nano
from perilune.errors import ConfigError
from perilune.serve.cache import CacheGeometry, cache_geometry
from perilune.serve.cache.geometry import default_unit
from perilune.serve.cache.layout import head_extent, state_moves, token_moves
from perilune.shapes.cache import cache_bytes_per_token, recurrent_bytes


@pytest.mark.parametrize("ranks, tokens", [(1, 6144), (2, 3072), (4, 1536), (8, 1024)])
def test_k3_pages(ranks, tokens):
    """Report: 1024 to 6144 tokens; 3 pages of 24 rows hold 69 states."""
    shape = cache_geometry(k3(), tensor_parallel=ranks)
    assert (shape.unit, shape.page_tokens, shape.groups) == (512, tokens, 3)
    assert shape.page_bytes == 24 * 1152 * tokens and shape.heads == 96 // ranks
    assert shape.state_bytes * ranks == 6_512_640 and shape.head_bytes == 67_840


def test_k3_costs():
    shape = cache_geometry(k3())
    assert shape.recurrent_layers * shape.state_bytes == recurrent_bytes(k3()) == 449_372_160
    assert shape.cost_tokens == pytest.approx(16_253.33, abs=0.01)
    assert cache_geometry(k3(), memory="bf16").page_tokens == 3072
    assert [shape.pages_for(n) for n in (0, 1, 6144, 6145)] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_geometry(name):
    cfg = PRESETS[name]()
    shape = cache_geometry(cfg)
    assert shape.page_tokens % shape.unit == 0 and 16 <= shape.unit <= 512
    assert shape.row_bytes >= shape.state_bytes > shape.row_bytes - shape.unit * shape.token_bytes or not shape.heads
    assert shape.groups * shape.attention_layers >= shape.recurrent_layers
    assert shape.attention_layers * shape.token_bytes == cache_bytes_per_token(cfg)
    assert shape.heads * shape.head_bytes == shape.state_bytes


def test_units_follow_the_cost_of_a_checkpoint():
    assert (cache_geometry(nano()).unit, cache_geometry(k2_nano()).unit) == (16, 16)
    assert [default_unit(int(32 * ratio), 1) for ratio in (1, 16, 45, 46, 512, 9000)] == [16, 16, 32, 64, 512, 512]
    assert cache_geometry(k3(), tensor_parallel=8).unit == cache_geometry(k3()).unit, "all ranks hash the same units"
    assert cache_geometry(k3(), unit=64).page_tokens == 5696


def test_a_model_without_states_has_no_groups():
    shape = cache_geometry(k2_nano())
    assert shape.groups == shape.heads == shape.head_bytes == 0 and shape.page_tokens == shape.unit


@pytest.mark.parametrize(
    "change, message",
    [
        ({"page_tokens": 1000}, "multiple of the hash unit 512"),
        ({"page_tokens": 5632}, "at least 5654 tokens"),
        ({"attention_layers": 0}, "a layer that caches tokens"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(cache_geometry(k3()), **change)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tensor_parallel": 5}, "num_heads=96 cannot be shared"),
        ({"tensor_parallel": 0}, "cannot be shared"),
        ({"memory": "int3"}, "memory='int3' is not known; allowed: fp32"),
        ({"unit": 0}, "unit=0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        cache_geometry(k3(), **options)


def test_the_cache_needs_no_torch():
    code = "import sys, perilune.serve.cache, perilune.serve.cache.layout; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# ---- layout: 5 recurrent and 2 attention layers, 12 heads of 7 bytes, 3 bytes a token


def shape_of(ranks: int, unit: int = 2) -> CacheGeometry:
    heads = 12 // ranks
    tokens = -(-heads * 7 // (3 * unit)) * unit
    return CacheGeometry(
        unit=unit, page_tokens=tokens, attention_layers=2, recurrent_layers=5, token_bytes=3, state_bytes=heads * 7,
        heads=heads, tensor_parallel=ranks,
    )  # fmt: skip


def states(shape: CacheGeometry, content: np.ndarray) -> np.ndarray:
    """Bytes [rank, page, page bytes] of states [layer, head, byte], written with array slices; 255 elsewhere."""
    pages = np.full((shape.tensor_parallel, shape.groups, shape.page_bytes), 255, np.uint8)
    for rank in range(shape.tensor_parallel):
        rows = pages[rank].reshape(shape.groups * shape.attention_layers, shape.row_bytes)
        own = content[:, rank * shape.heads : (rank + 1) * shape.heads]
        rows[: shape.recurrent_layers, : shape.state_bytes] = own.reshape(shape.recurrent_layers, -1)
    return pages


def tokens(shape: CacheGeometry, content: np.ndarray) -> np.ndarray:
    """Bytes [rank, page, page bytes] of cached tokens [layer, token, byte]."""
    pages = shape.pages_for(content.shape[1])
    padded = np.full((2, pages * shape.page_tokens, 3), 255, np.uint8)
    padded[:, : content.shape[1]] = content
    one = padded.reshape(2, pages, shape.page_tokens * 3).transpose(1, 0, 2).reshape(pages, shape.page_bytes)
    return np.stack([one] * shape.tensor_parallel)


def carry_out(moves, source: np.ndarray, target: np.ndarray) -> int:
    count = 0
    for move in moves:
        a, b = move.source, move.target
        assert a.length == b.length > 0
        data = source[move.source_rank, a.page, a.offset : a.offset + a.length]
        place = target[move.target_rank, b.page, b.offset : b.offset + b.length]
        assert data.size == place.size == a.length and (place == 255).all(), "each byte is written once"
        place[:] = data
        count += a.length
    return count


RANKS = (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize("there", RANKS)
@pytest.mark.parametrize("here", RANKS)
def test_states_move_to_another_number_of_ranks(there, here):
    content = np.random.randint(0, 255, (5, 12, 7), np.uint8)
    source, target = shape_of(there), shape_of(here)
    found = np.full_like(states(target, content), 255)
    assert carry_out(state_moves(source, target), states(source, content), found) == content.size
    assert np.array_equal(found, states(target, content))


@given(there=st.sampled_from(RANKS), here=st.sampled_from(RANKS), end=st.integers(0, 90), start=st.integers(0, 90))
def test_tokens_move_to_pages_of_another_size(there, here, end, start):
    source, target, start = shape_of(there), shape_of(here, unit=3), min(start, end)
    content = np.random.default_rng(end).integers(0, 255, (2, end, 3), np.uint8)
    wanted = tokens(target, content)
    wanted[...] = np.where(
        tokens(target, np.full_like(content, 1) * (np.arange(end) >= start)[:, None]) == 1, wanted, 255
    )
    found = np.full_like(wanted, 255)
    moves = list(token_moves(source, target, start, end))
    moved = carry_out(moves, tokens(source, content), found)
    senders = {move.source_rank for move in moves}
    assert senders == set(range(min(there, here) if start < end else 0)), "the load is spread"
    assert moved == here * 2 * (end - start) * 3 and np.array_equal(found, wanted)


def test_one_head_is_one_run_of_bytes():
    shape = cache_geometry(k3(), tensor_parallel=8)
    assert head_extent(shape, 0, 0).length == 67_840
    last = head_extent(shape, 68, 11)
    assert (last.page, last.offset) == (2, 20 * shape.row_bytes + 11 * 67_840)
    moves = list(state_moves(shape, cache_geometry(k3(), tensor_parallel=2)))
    assert len(moves) == 69 * 8 and {move.source.length for move in moves} == {12 * 67_840}


def test_different_models_are_not_mixed():
    source = shape_of(2)
    for change, name in (({"recurrent_layers": 4}, "recurrent_layers"), ({"state_bytes": 36}, "head_bytes")):
        with pytest.raises(ConfigError, match=name):
            list(state_moves(source, replace(source, **change)))
    with pytest.raises(ConfigError, match="same heads in all"):
        list(state_moves(source, replace(source, tensor_parallel=1)))
