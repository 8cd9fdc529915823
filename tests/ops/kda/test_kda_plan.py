"""Tables of chunks and segments, and which calls the Triton kernels take; no Triton needed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from perilune.ops.kda.arguments import check
from perilune.ops.kda.triton import support
from perilune.ops.kda.triton.plan import CHUNK, LEAST_SEGMENT, plan

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "offsets", [(0, 0), (0, 1), (0, 64, 64, 129), (0, 10_000, 10_003, 90_000), tuple(range(0, 9 * 2048, 2048))]
)
@pytest.mark.parametrize("slots", [1, 132, 10_000])
def test_chunks_and_units_cover_every_token_once(offsets: tuple[int, ...], slots: int) -> None:
    p = plan(offsets, 12, 128, 128, slots, CPU)
    tokens = [t for start, count in p.chunks.tolist() for t in range(start, start + count)]
    assert tokens == list(range(offsets[-1]))
    assert all(1 <= count <= CHUNK for _, count in p.chunks.tolist())
    units = p.units.tolist()
    assert [c for first, count, *_ in units for c in range(first, first + count)] == list(range(p.chunk_count))
    for n, (first, count) in enumerate(p.sequences.tolist()):
        mine = units[first : first + count]
        assert [u[4] for u in mine] == [n] + [-1] * (count - 1) and [u[5] for u in mine] == [-1] * (count - 1) + [n]
        assert all(u[3] == offsets[n + 1] and u[2] == offsets[n] + CHUNK * (u[0] - mine[0][0]) for u in mine)
    assert p.split == any(count > 1 for _, count in p.sequences.tolist())


def test_segments_fill_the_device_but_are_not_short() -> None:
    counts = [
        plan((0, length), heads, 128, 128, 132, CPU).unit_count
        for length, heads in ((8192, 96), (65_536, 12), (8192, 12))
    ]
    assert counts == [1, 11, 8192 // CHUNK // LEAST_SEGMENT]
    lengths = [count for _, count, *_ in plan((0, 65_536), 12, 128, 128, 132, CPU).units.tolist()]
    assert max(lengths) - min(lengths) <= 1


def test_t20_chunks_start_anew_with_each_sequence() -> None:
    starts = [start for start, _ in plan((0, 70, 200), 1, 128, 128, 1, CPU).chunks.tolist()]
    assert starts == [0, 64, 70, 134, 198]
    assert all(b > a for a, b in pairwise(starts))


def arguments(dtype: torch.dtype = torch.bfloat16, key_dim: int = 128, value_dim: int = 128, **options: object):
    q = torch.zeros(1, 2, 1, key_dim, dtype=dtype)
    v = torch.zeros(1, 2, 1, value_dim, dtype=dtype)
    settings = {"use_gate_in_kernel": True, "lower_bound": -5.0, "A_log": torch.zeros(1)} | options
    return check(q, q, v, q, v[..., 0], **settings)


def test_calls_that_the_kernels_do_not_take_say_why() -> None:
    for args in (arguments(), arguments(lower_bound=None), arguments(torch.float16), arguments(key_dim=64)):
        assert support.unsuitable(args) is None
    for args, word in (
        (arguments(key_dim=96), "64 or 128, not 96"),
        (arguments(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True), "up to 2"),
    ):
        reason = support.unsuitable(args)
        assert reason is not None and word in reason
