"""Pages as bytes: heads lie one behind the other, operations touch what they should, and other rank counts get their heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perilune.config.presets import preset, tiny
from perilune.errors import CapacityError, ConfigError
from perilune.model.paged import PagedRows
from perilune.serve.cache import CopyPage, RestoreState, ZeroState, cache_geometry
from perilune.serve.cache.layout import head_extent
from perilune.serve.runner import PagePool, pool_geometry
from perilune.serve.runner.relayout import move_state, move_tokens

CPU = torch.device("cpu")


def filled(cfg, geometry, pages, seed=0, dtype=torch.float32) -> PagePool:
    pool = PagePool(cfg, geometry, pages, dtype, CPU)
    pool.bytes_PR.copy_(torch.randint(0, 256, pool.bytes_PR.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def rows_of(groups_pages) -> PagedRows:
    nothing = torch.zeros(0, dtype=torch.int64)
    return PagedRows([0], nothing, nothing, nothing.view(1, 0), nothing, torch.tensor(groups_pages)[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_comes_back_as_it_was_written(dtype):
    cfg = tiny()
    geometry = pool_geometry(cfg, dtype, unit=4)
    pool = filled(cfg, geometry, 8, dtype=dtype)
    layers = [layer for layer in pool.layers(rows_of([5, 2, 7])) if hasattr(layer, "memory_BHVK")]
    before = pool.bytes_PR.clone()
    kda = cfg.kda
    wide = torch.promote_types(dtype, torch.float32)
    for number, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(number)
        memory = torch.randn(1, kda.num_heads, kda.value_dim, kda.head_dim, generator=generator).to(wide)
        window = torch.randn(1, kda.conv_width, kda.conv_kernel - 1, generator=generator).to(dtype)
        layer.memory_BHVK, layer.window_BXW = memory, window
        assert torch.equal(layer.memory_BHVK, memory) and torch.equal(layer.window_BXW, window)
        page = pool.bytes_PR[[5, 2, 7][number // geometry.attention_layers]]
        for head in range(kda.num_heads):
            extent = head_extent(geometry, number, head)
            run = page[extent.offset : extent.offset + extent.length]
            size = kda.value_dim * kda.head_dim * wide.itemsize
            assert torch.equal(run[:size].view(wide), memory[0, head].flatten())
            q, k, v = window[0].split((kda.key_width, kda.key_width, kda.value_width))
            parts = [part.unflatten(0, (kda.num_heads, -1))[head].flatten() for part in (q, k, v)]
            assert torch.equal(run[size:].view(dtype), torch.cat(parts))
    others = [page for page in range(8) if page not in (5, 2, 7)]
    assert torch.equal(pool.bytes_PR[others], before[others])


def test_operations_touch_their_pages_only():
    cfg = tiny()
    geometry = pool_geometry(cfg, torch.float32, unit=4)
    pool = filled(cfg, geometry, 9)
    before = pool.bytes_PR.clone()
    pool.operate([CopyPage(0, 1, 5), ZeroState((2, 3)), RestoreState((4, 5), (6, 7), 8)])
    size = geometry.row_bytes
    for row in range(geometry.attention_layers):
        copied = 5 * geometry.token_bytes
        assert torch.equal(pool.bytes_PR[1, row * size :][:copied], before[0, row * size :][:copied])
        assert torch.equal(
            pool.bytes_PR[1, row * size + copied :][: size - copied], before[1, row * size + copied :][: size - copied]
        )
    assert not pool.bytes_PR[[2, 3]].any() and torch.equal(pool.bytes_PR[[6, 7]], before[[4, 5]])
    assert torch.equal(pool.bytes_PR[[0, 4, 5, 8]], before[[0, 4, 5, 8]])


def test_bytes_leave_and_return():
    cfg = tiny()
    pool = filled(cfg, pool_geometry(cfg, torch.float32, unit=4), 5)
    before = pool.bytes_PR.clone()
    contents = pool.read_bytes([3, 1])
    assert [bytes(page.buffer()) for page in contents] == [before[page].numpy().tobytes() for page in (3, 1)]
    pool.bytes_PR.zero_()
    assert pool.write_bytes([0, 4], contents) is None
    assert torch.equal(pool.bytes_PR[[0, 4]], before[[3, 1]]) and not pool.bytes_PR[[1, 2, 3]].any()


@pytest.mark.parametrize(("sender", "receiver"), [(1, 2), (2, 1), (4, 2), (2, 4), (4, 1)])
def test_another_number_of_ranks_gets_its_heads(sender, receiver):
    """Over there and back again every byte of the states and tokens is where it was."""
    cfg = dataclasses.replace(tiny(), kda=dataclasses.replace(tiny().kda, num_heads=4))
    here, there = (cache_geometry(cfg, tensor_parallel=ranks, unit=4) for ranks in (sender, receiver))

    def states(geometry, ranks, seed):
        generator = torch.Generator().manual_seed(seed)
        shape = (geometry.groups, geometry.page_bytes)
        return [torch.randint(0, 256, shape, generator=generator).to(torch.uint8) for _ in range(ranks)]

    source, target, back = states(here, sender, 0), states(there, receiver, 1), states(here, sender, 2)
    moved = move_state(source, here, target, there)
    assert moved == cfg.kda.num_heads * here.head_bytes * here.recurrent_layers
    move_state(target, there, back, here)
    for layer in range(here.recurrent_layers):
        for head in range(4):
            rank, local = divmod(head, here.heads)
            there_rank, there_local = divmod(head, there.heads)
            one, two = head_extent(here, layer, local), head_extent(there, layer, there_local)
            run = source[rank][one.page, one.offset : one.offset + one.length]
            assert torch.equal(run, target[there_rank][two.page, two.offset : two.offset + two.length])
            assert torch.equal(run, back[rank][one.page, one.offset : one.offset + one.length])
    length = 37

    def tokens(geometry, ranks):
        return [torch.zeros(geometry.pages_for(length), geometry.page_bytes, dtype=torch.uint8) for _ in range(ranks)]

    entries = torch.randint(1, 256, (here.attention_layers, length, here.token_bytes), dtype=torch.uint8)
    source, target = tokens(here, sender), tokens(there, receiver)

    def place(geometry, pages, layer, token):
        page, slot = divmod(token, geometry.page_tokens)
        return pages[page, layer * geometry.row_bytes + slot * geometry.token_bytes :][: geometry.token_bytes]

    for pages in source:
        for layer in range(here.attention_layers):
            for token in range(length):
                place(here, pages, layer, token).copy_(entries[layer, token])
    move_tokens(source, here, target, there, 0, length)
    for pages in target:
        for layer in range(here.attention_layers):
            for token in range(length):
                assert torch.equal(place(there, pages, layer, token), entries[layer, token])


def test_other_models_and_types_are_refused():
    cfg = tiny()
    with pytest.raises(ConfigError, match="int8"):
        pool_geometry(cfg, torch.int8)
    other = dataclasses.replace(cfg, num_layers=8)
    pages = [torch.zeros(6, 1 << 16, dtype=torch.uint8)]
    with pytest.raises(ConfigError, match="same model"):
        move_state(pages, cache_geometry(cfg, unit=4), pages, cache_geometry(other, unit=4))
    with pytest.raises(CapacityError, match="no room"):
        PagePool(cfg, pool_geometry(cfg, torch.float32, unit=4), 1 << 44, torch.float32, CPU)


@pytest.mark.parametrize("name", ["tiny", "nano", "small", "mini", "mid"])
def test_on_a_gpu_units_and_pages_are_whole_chunks_of_its_kernels(name):
    geometry = pool_geometry(preset(name), torch.bfloat16, device=torch.device("cuda"))
    assert geometry.unit % 64 == 0 and geometry.page_tokens % 64 == 0
    asked = pool_geometry(preset(name), torch.bfloat16, unit=100, device=torch.device("cuda"))
    assert asked.unit == 128, "rounded up"
    assert pool_geometry(preset(name), torch.bfloat16, unit=4, device=torch.device("cpu")).unit == 4
