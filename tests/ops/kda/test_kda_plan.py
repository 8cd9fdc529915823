"""Tables of chunks and segments, and which calls the Triton kernels take; no Triton needed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from perilune.ops.kda.arguments import check
from perilune.ops.kda.gpu import support
from perilune.ops.kda.gpu.padded_plan import NEVER, Room
from perilune.ops.kda.gpu.plan import CHUNK, LEAST_SEGMENT, fastest, plan

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "offsets", [(0, 0), (0, 1), (0, 64, 64, 129), (0, 10_000, 10_003, 90_000), tuple(range(0, 9 * 2048, 2048))]
)
@pytest.mark.parametrize("target", [1, 7, 100_000])
def test_chunks_and_units_cover_every_token_once(offsets: tuple[int, ...], target: int) -> None:
    p = plan(offsets, target, 128, CPU)
    tokens = [t for start, count in p.chunks.tolist() for t in range(start, start + count)]
    assert tokens == list(range(offsets[-1]))
    assert all(1 <= count <= CHUNK for _, count in p.chunks.tolist())
    units = p.units.tolist()
    assert [c for first, count, *_ in units for c in range(first, first + count)] == list(range(p.chunk_count))
    for n, (first, count) in enumerate(p.sequences.tolist()):
        mine = units[first : first + count]
        assert [u[4] for u in mine] == [n] + [-1] * (count - 1) and [u[5] for u in mine] == [-1] * (count - 1) + [n]
        assert all(u[3] == offsets[n + 1] and u[2] == offsets[n] + CHUNK * (u[0] - mine[0][0]) for u in mine)
    assert p.full == (all(count == CHUNK for _, count in p.chunks.tolist()))
    assert p.split == any(count > 1 for _, count in p.sequences.tolist())


def chosen(length: int, heads: int, rows: int = 1, in_cuda: bool = True) -> tuple[int, int]:
    """Units of a sequence, and value channels of a program, on 132 multiprocessors."""
    target, width = fastest(tuple(range(0, (rows + 1) * length, length)), heads, 128, 128, in_cuda, 132)
    return plan((0, length), target, width, CPU).unit_count, width


@pytest.mark.parametrize("in_cuda", [True, False])
def test_segments_fill_the_device_but_are_not_short(in_cuda: bool) -> None:
    assert chosen(8192, 96, in_cuda=in_cuda) == (1, 128)
    assert chosen(2048, 32, rows=8, in_cuda=in_cuda) == (1, 128)
    assert all(chosen(65_536, heads, in_cuda=in_cuda)[0] > 1 for heads in (1, 12, 32))
    few, width = chosen(8192, 12, in_cuda=in_cuda)
    assert 1 < few <= 8192 // CHUNK // LEAST_SEGMENT and width <= 128
    lengths = [count for _, count, *_ in plan((0, 65_536), 93, 128, CPU).units.tolist()]
    assert len(lengths) == 11 and max(lengths) - min(lengths) <= 1


def test_narrow_programs_where_there_are_few_heads_and_too_little_to_cut() -> None:
    assert chosen(1024, 8) == (1, 64) and chosen(1024, 8, in_cuda=False) == (1, 128)


def test_a_plan_of_many_sequences_is_quick() -> None:
    offsets = tuple(range(0, 3_000_000, 1500))
    assert fastest(offsets, 32, 128, 128, True, 132)[1] == 128
    assert not plan((0, 0), *fastest((0, 0), 4, 64, 64, True, 132), CPU).unit_count - 1


def test_t20_chunks_start_anew_with_each_sequence() -> None:
    starts = [start for start, _ in plan((0, 70, 200), 100, 128, CPU).chunks.tolist()]
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
        (arguments(cu_seqlens=(0,) * 32_769 + (2,)), "32768 sequences at once, not 32769"),
        (arguments(plan=Room(2, 40_000, NEVER, 128).plan(torch.zeros(640_000, dtype=torch.int32))), "not 80000"),
    ):
        reason = support.unsuitable(args)
        assert reason is not None and word in reason


@pytest.mark.parametrize("target", [NEVER, 2])
@pytest.mark.parametrize("offsets", [(0, 640), (0, 1, 2, 640), tuple(range(0, 641, 64)), (0, 300, 640)])
def test_room_holds_any_documents_and_defines_every_chunk(offsets: tuple[int, ...], target: int) -> None:
    room = Room(640, 10, target, 64)
    p = room.plan(torch.from_numpy(room.filled(offsets)))
    own = plan(offsets, target, 64, CPU)
    assert torch.equal(p.chunks[: own.chunk_count], own.chunks) and not p.chunks[own.chunk_count :].any()
    assert torch.equal(p.sequences[: len(own.sequences)], own.sequences)
    seen = sorted(c for first, count, *_ in p.units.tolist() for c in range(first, first + count))
    assert seen == list(range(room.chunks)), "each chunk is in one unit"
    begins = [n for *_, n, _ in p.units.tolist() if n >= 0]
    assert begins == list(range(10)) and p.split is (target == 2)
    assert room.boundaries(offsets)[: len(offsets)] == offsets and len(room.boundaries(offsets)) == 11
