"""A tensor as the GPU's copying unit knows it: what `copy_tile` of device.h takes as a kernel's parameter `TILE_MAP name`."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from torch import Tensor

from perilune.ops.cuda import driver

WORDS = 16  # of 64 bits
PLACE = 112  # byte of a kernel's parameters where the first map lies, see device.h
CHANNELS = 64  # of a tile: 128 bytes
_BFLOAT16, _NOT_INTERLEAVED, _SWIZZLED_128, _CACHE_LINES_256, _ZEROS_OUTSIDE = 9, 0, 3, 3, 0  # of CUtensorMap*


def tile_map(x_ORC: Tensor, rows: int) -> tuple[int, ...]:
    """`x` as tiles of `rows` rows and 64 channels: 16 words, to be given as so many 64-bit parameters.

    Args:
        x_ORC: bfloat16 `[outer, rows, channels]`, dense along channels, all else at multiples of 16 bytes.
        rows: of a tile, at most 256.

    Raises:
        CudaError: the driver does not take the tensor.
    """
    outer, row, inner = x_ORC.stride()
    assert inner == 1 and not (x_ORC.data_ptr() % 16 or outer % 8 or row % 8), "tiles begin at multiples of 16 bytes"
    shape = tuple(x_ORC.shape)
    if x_ORC.is_cuda:
        return _encoded(x_ORC.data_ptr(), shape, (outer, row), rows)
    return (x_ORC.data_ptr(), *shape, 2 * outer, 2 * row, rows, *[0] * (WORDS - 7))


@lru_cache(4096)  # a pool of a serving engine has one for each layer
def _encoded(pointer: int, shape: tuple[int, ...], strides: tuple[int, int], rows: int) -> tuple[int, ...]:
    outer, count, channels = shape
    memory = (ctypes.c_uint64 * (WORDS + 8))()
    start = -ctypes.addressof(memory) % 64
    sizes = (ctypes.c_uint64 * 3)(channels, count, outer)
    # a stride over a single one is never taken, but must look like one
    bytes_between = (ctypes.c_uint64 * 2)(2 * strides[1] or 16, 2 * strides[0] or 16)
    tile, each = (ctypes.c_uint32 * 3)(CHANNELS, rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    driver.encode_tiles(
        ctypes.addressof(memory) + start, _BFLOAT16, 3, pointer, sizes, bytes_between, tile, each, _NOT_INTERLEAVED,
        _SWIZZLED_128, _CACHE_LINES_256, _ZEROS_OUTSIDE,
    )  # fmt: skip
    return tuple(memory[start // 8 : start // 8 + WORDS])
