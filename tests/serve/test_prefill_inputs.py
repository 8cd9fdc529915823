"""What a recorded prefill pass reads says of its chunks what `chunk_rows` says, and of all else that it is spare."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from tiny_model import tiny_model

from perilune.ops.kda.gpu.padded_plan import NEVER
from perilune.ops.kda.gpu.padded_plan import Room as Tables
from perilune.ops.kda.gpu.plan import tables
from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import ExportState
from perilune.serve.runner.pages import Spare
from perilune.serve.runner.prefill import CHUNKS, MARKS, PrefillInputs, Room
from perilune.serve.runner.rows import chunk_rows, marked

SIZE, GROUPS, UNIT, CPU = 256, 3, 64, torch.device("cpu")
SPARE = Spare(900, 901, 902)


def chunks_of(seed: int) -> list[Chunk]:
    """Some, behind prefixes or not, with states inside and at their ends."""
    choose, free, found = random.Random(seed), iter(range(900)), []
    for number in range(choose.choice((1, 2, 5, CHUNKS - 1))):
        start = UNIT * choose.choice((0, 0, 3, 4, 9))
        end = start + choose.choice((1, 5, UNIT, 3 * UNIT, 3 * UNIT + 1))
        inside = [n for n in range(start + UNIT, end + 1, UNIT) if n % 128 == 0]
        exports = tuple(ExportState(n, tuple(next(free) for _ in range(GROUPS)), "test") for n in inside)
        pages = [next(free) for _ in range(-(-end // SIZE) + choose.choice((0, 1)))]  # one more may have been taken
        state = tuple(next(free) for _ in range(GROUPS))
        found.append(Chunk(f"r{number}", 0, start, end, pages, state, (), exports))
    return found


def test_a_room_describes_its_chunks():
    room = Room(4096, 64)
    recurrence = Tables(room.tokens, CHUNKS, NEVER, 64)
    inputs = PrefillInputs(room, SIZE, GROUPS, SPARE, CPU, recurrence)
    seen = 0
    for seed in range(12):  # the same tensors again and again
        chunks = chunks_of(seed)
        ids = [list(range(chunk.start, chunk.end)) for chunk in chunks]
        inputs.fill(chunks, ids)
        rows, wanted = inputs.rows(), chunk_rows([*chunks, *chunks], SIZE, CPU)  # of at least two
        tokens, count = sum(map(len, ids)), len(chunks)
        pages = sum(-(-chunk.end // SIZE) for chunk in chunks)
        assert inputs.ids_1T[0, :tokens].tolist() == sum(ids, [])
        assert torch.equal(rows.page_N[:tokens], wanted.page_N[:tokens])
        assert torch.equal(rows.slot_N[:tokens], wanted.slot_N[:tokens])
        assert torch.equal(rows.table_BP[0, :pages], wanted.table_BP[0, :pages])
        assert torch.equal(rows.state_GB[:, :count], wanted.state_GB[:, :count])
        assert set(rows.page_N[tokens:].tolist()) <= {SPARE.tokens} >= set(rows.table_BP[0, pages:].tolist())
        assert set(rows.state_GB[:, count:].flatten().tolist()) == {SPARE.states}
        ours, theirs = rows.packing, wanted.packing
        assert ours is not None and theirs is not None
        for name in ("chunk_T", "since_T"):
            assert torch.equal(getattr(ours.chunks, name)[:tokens], getattr(theirs.chunks, name)[:tokens])
        for name in ("first_T", "last_T"):
            assert torch.equal(getattr(ours.cached, name)[:tokens], getattr(theirs.cached, name)[:tokens])
            assert bool((getattr(ours.cached, name).diff() >= 0).all()), "the kernel needs what queries see to ascend"
        assert int(ours.cached.last_T.max()) < pages * SIZE
        assert torch.equal(ours.chunks.begin_N[:count], theirs.chunks.begin_N[:count])
        assert torch.equal(ours.last_N[:count], theirs.last_N[:count]) and set(ours.last_N.tolist()) == set(
            ours.last_N[:count].tolist()
        )
        assert torch.equal(ours.beyond_NS[:count], theirs.beyond_NS[:count])
        assert (inputs.ends_N[:count] + 1).tolist() == list(accumulate(map(len, ids)))
        # Points: the ends of all chunks, what is left and nothing, then the marks.
        lengths = [*map(len, ids), room.tokens - tokens, *[0] * (CHUNKS - count - 1)]
        found = [(n, export.position - chunks[n].start) for n, export in marked(chunks)]
        points = list(zip(ours.chunks.point_chunk_M.tolist(), ours.chunks.point_tokens_M.tolist(), strict=True))
        assert points == [*enumerate(lengths), *found, *[(0, 0)] * (MARKS - len(found))]
        targets = [export.targets for _, export in marked(chunks)]
        assert rows.mark_GM is not None and rows.mark_GM.T.tolist() == [
            *map(list, targets),
            *[[SPARE.unread] * GROUPS] * (MARKS - len(found)),
        ]
        planned, offsets = ours.planned, tuple(accumulate(lengths, initial=0))
        assert planned is not None and (planned.sequences, planned.marks) == (CHUNKS, MARKS)
        real = tables(offsets, NEVER).chunks
        assert torch.equal(planned.plan.chunks[: len(real)], torch.from_numpy(real))
        for place, (number, at) in enumerate(found):
            (behind,) = (planned.slots == place).nonzero()[:, 0].tolist()
            assert int(real[behind].sum()) == offsets[number] + at
            seen += 1
        assert int((planned.slots >= 0).sum()) == len(found)
    assert seen > 10


def test_nothing_of_the_last_pass_is_left():
    inputs = PrefillInputs(Room(512, 16), SIZE, GROUPS, SPARE, CPU, None)
    first, then = chunks_of(3), [Chunk("one", 0, 0, 7, [5], (1, 2, 3), (), ())]
    inputs.fill(first[:1], [[9] * (first[0].end - first[0].start)])
    inputs.fill(then, [[4] * 7])
    fresh = PrefillInputs(Room(512, 16), SIZE, GROUPS, SPARE, CPU, None)
    fresh.fill(then, [[4] * 7])
    for a, b in ((inputs._wide, fresh._wide), (inputs._narrow, fresh._narrow)):
        assert torch.equal(a._there, b._there)


def test_the_pool_has_spare_pages():
    """Zeros that nobody is given, behind those that are."""
    from perilune.serve.runner import PagePool, pool_geometry

    model = tiny_model()
    geometry = pool_geometry(model.cfg, model.compute_dtype, unit=4)
    pool = PagePool(model.cfg, geometry, 5, model.compute_dtype, CPU)
    pool.bytes_PR.fill_(255)
    assert pool.bytes_PR.shape == (5, geometry.page_bytes) and min(pool.spare) == 5
    for one in (*pool._caches, *(state[0] for state in pool._states)):
        assert len(one) == 8 and bool((one[5:] == 0).all())
