"""Chunks of several sequences give what each gives alone; the kernel is in `interpreted_elementwise`."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.choice import force
from perilune.ops.packed_conv import Chunks, packed_conv
from perilune.ops.short_conv import short_conv, short_conv_reference


@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_chunks_go_on_where_they_stopped(implementation: str) -> None:
    torch.manual_seed(0)
    lengths = (1, 9, 2, 4)
    points = [(n, length) for n, length in enumerate(lengths)] + [(1, 2), (1, 5), (2, 1)]
    chunks = Chunks.of(lengths, points, lambda x: x)
    x, weight, window = torch.randn(16, 6), torch.randn(6, 4), torch.randn(4, 6, 3)
    with force(implementation):
        y, windows = packed_conv(x, weight, window, chunks)
        for n, part in enumerate(x.split(lengths)):
            alone, after = short_conv(part[None], weight, window[n : n + 1])
            assert torch.equal(y[chunks.offsets[n] : chunks.offsets[n + 1]], alone[0])
            assert torch.equal(windows[n], after[0])
    for (n, tokens), found in zip(points, windows, strict=True):
        part = x[chunks.offsets[n] :][:tokens]
        _, expected = short_conv_reference(part[None], weight, window[n : n + 1])
        assert torch.equal(found, expected[0])


def test_no_points_give_no_windows() -> None:
    chunks = Chunks.of((3,), [], lambda x: x)
    assert packed_conv(torch.randn(3, 2), torch.randn(2, 4), torch.randn(1, 2, 3), chunks)[1].shape == (0, 2, 3)
