"""Host and disk behind the pool: what was evicted comes back bit by bit, and whatever is lost is computed again."""

from __future__ import annotations

import errno
import os
import queue
import random
import threading

import pytest
import torch
from tiny_model import TOKENIZER, tiny_engine, tiny_model

from perilune.errors import CapacityError, ConfigError
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams, Service
from perilune.serve.settings import EngineSettings
from perilune.serve.tiers import DiskTier, memory, tiers
from perilune.serve.tiers.index import Prefix, TierIndex

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def prompt(seed: int, length: int = 90) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def small(host: int = 2**22, **more) -> EngineSettings:
    """A pool of few pages, so that each prompt evicts the last one."""
    return EngineSettings(unit=4, cache_bytes=0, host_bytes=host, **more)


def make(settings, seed: int = 0) -> LocalEngine:
    return tiny_engine(seed, context_length=130, settings=settings)


def ask(engine, ids, **options):
    job = engine.complete([ids], GREEDY, **options)
    list(job)
    return job.answers[0].token_ids, job.usage.cached_tokens


def expected(ids):
    return ask(make(small(0)), ids)[0]


def test_what_the_pool_evicted_is_a_hit_again():
    engine = make(small())
    first = [ask(engine, prompt(seed)) for seed in range(6)]
    again = [ask(engine, prompt(seed)) for seed in range(6)]
    assert [ids for ids, _ in first] == [ids for ids, _ in again] == [expected(prompt(seed)) for seed in range(6)]
    assert [cached for _, cached in first] == [0] * 6 and [cached for _, cached in again] == [88] * 6
    counts = engine.metrics().tiers
    assert counts["host_hits_total"] >= 4 and counts["written_back_total"] >= 5
    assert engine.admin.check_invariants() == [] and engine.metrics().pages_used == 0


def test_without_tiers_it_is_lost():
    engine = make(small(0))
    for seed in range(6):
        ask(engine, prompt(seed))
    assert ask(engine, prompt(0))[1] == 0 and engine.metrics().tiers == {}


def test_t16_empty_tiers_change_nothing():
    """The same hits and answers as without them."""
    base = prompt(1)
    requests = [base[:40], base[:70], base, base[:41] + prompt(2, 20), base]
    with_tiers, without = make(small()), make(small(0))
    assert [ask(with_tiers, ids) for ids in requests] == [ask(without, ids) for ids in requests]


def test_shared_pages_are_kept_once():
    engine = make(small())
    base = prompt(7, 80)
    for tail in range(3):
        ask(engine, base + prompt(tail, 9))
    for seed in range(10, 14):
        ask(engine, prompt(seed))
    geometry = engine.core.cache.geometry
    index = engine.core.tiers._host.index
    apart = len(index) * geometry.groups + sum(len(prefix.pages) for prefix in index)
    assert index.nbytes < apart * geometry.page_bytes


def test_the_host_is_bounded_and_a_lease_outlives_others():
    geometry = make(small()).core.cache.geometry
    room = 3 * (geometry.groups + geometry.pages_for(90)) * geometry.page_bytes
    engine = make(small(room))
    ask(engine, prompt(0), service=Service(session_id="kept"))
    for seed in range(1, 9):
        ask(engine, prompt(seed))
    assert engine.metrics().tiers["host_bytes"] <= room
    assert ask(engine, prompt(0))[1] > 0 and ask(engine, prompt(1))[1] == 0


def test_a_restart_keeps_the_disk(tmp_path):
    engine = make(small(disk=tmp_path))
    first = [ask(engine, prompt(seed))[0] for seed in range(4)]
    engine.close()
    assert not list(tmp_path.glob("*.part"))
    again = make(small(disk=tmp_path))
    assert [ask(again, prompt(seed)) for seed in range(4)] == [(ids, 88) for ids in first]
    assert again.metrics().tiers["disk_hits_total"] == 4
    again.close()


def test_other_weights_find_nothing(tmp_path):
    engine = make(small(disk=tmp_path))
    ask(engine, prompt(0))
    engine.close()
    other = make(small(disk=tmp_path), seed=1)
    assert ask(other, prompt(0))[1] == 0
    other.close()


def read(disk: DiskTier, prefix: Prefix) -> list[bytes]:
    """Pages and states of a prefix, 100 bytes each."""
    found = [bytearray(100) for _ in range(len(prefix.pages) + 1)]
    assert disk.get(prefix, found[:-1], found[-1:])
    return [bytes(content) for content in found]


@pytest.mark.parametrize("fault", ["flipped", "cut", "missing", "foreign"])
def test_damaged_files_are_computed_again(tmp_path, fault):
    engine = make(small(disk=tmp_path))
    answer, _ = ask(engine, prompt(0))
    engine.close()
    for path in tmp_path.glob("*.tokens"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        if fault == "missing":
            path.unlink()
        else:
            path.write_bytes({"flipped": content, "cut": content[:-9], "foreign": b"something else"}[fault])
    again = make(small(disk=tmp_path))
    assert ask(again, prompt(0)) == (answer, 0)
    assert ask(again, prompt(0)) == (answer, 88)
    again.close()
    assert again.core.tiers._disk.damaged == (fault != "missing")


def files(folder) -> list:
    """What a tier keeps in its folder."""
    return sorted([*folder.glob("*.tokens*"), *folder.glob("*.state*")])


def test_the_disk_is_bounded_and_half_written_files_go(tmp_path):
    (tmp_path / "ab.tokens.part").write_bytes(b"half")
    (tmp_path / "cd.tokens").write_bytes(b"of nothing")
    disk = DiskTier(tmp_path, 1000, page_bytes=100, state_bytes=100)
    assert files(tmp_path) == []
    for number in range(8):
        names = (b"shared", bytes([number]))
        disk.put(Prefix(bytes([number, 1]), 8, names), dict.fromkeys(names, b"p" * 100), [b"s" * 100])
    assert disk.index.nbytes <= 1000 and len(disk.index) == 4
    assert len(files(tmp_path)) == 4 + 4 + 1
    again = DiskTier(tmp_path, 1000, page_bytes=100, state_bytes=100)
    assert {prefix.digest for prefix in again.index} == {prefix.digest for prefix in disk.index}
    assert read(again, next(iter(again.index))) == [b"p" * 100, b"p" * 100, b"s" * 100]
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier(file, 1000, 100, 100)


def test_a_disk_without_room_keeps_no_half_of_a_prefix(tmp_path, monkeypatch):
    """The states of a prefix do not fit after its pages have been written."""
    disk = DiskTier(tmp_path, 10_000, page_bytes=100, state_bytes=100)
    disk.put(Prefix(b"first", 8, (b"shared",)), {b"shared": b"p" * 100}, [b"s" * 100])
    before = sorted(tmp_path.iterdir())
    sync = os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 300:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    second = Prefix(b"second", 16, (b"shared", b"own"))
    for _ in range(2):
        disk.put(second, dict.fromkeys(second.pages, b"p" * 100), [b"s" * 300])
    assert sorted(tmp_path.iterdir()) == before and disk.refused == 2 and b"second" not in disk.index
    monkeypatch.undo()
    disk.put(second, dict.fromkeys(second.pages, b"p" * 100), [b"s" * 100])
    assert read(disk, second) == [b"p" * 100, b"p" * 100, b"s" * 100]


def test_deepest_counts_as_used():
    index = TierIndex(300, page_bytes=0, state_bytes=100)
    chain = [bytes([unit]) for unit in range(5)]
    for units in (1, 3, 4):
        index.add(Prefix(chain[units - 1], units, ()))
    assert index.deepest(chain, 0, 5).depth == 4 and index.deepest(chain, 0, 3).depth == 3
    assert index.deepest(chain, 3, 3) is None and index.deepest(chain, 0, 1).depth == 1
    index.add(Prefix(b"new", 1, ()))
    assert index.crowd(0.0).depth == 4, "the others were used later"


def test_others_go_on_while_pages_are_fetched(monkeypatch):
    """As on a GPU: the copy is waited for elsewhere. Who asks for the same prefix meanwhile waits for the same copy."""
    engine = make(small())
    answer, _ = ask(engine, prompt(0))
    for seed in range(1, 5):
        ask(engine, prompt(seed))
    pool, go, asked = engine.core.runner.pool, threading.Event(), queue.SimpleQueue()
    fill = pool.write_bytes

    def write_later(pages, contents):
        asked.put(len(pages))

        def wait():
            assert go.wait(20)
            fill(pages, contents)

        return wait

    monkeypatch.setattr(pool, "write_bytes", write_later)
    jobs = [engine.complete([prompt(0)], GREEDY) for _ in range(2)]
    waiting = [threading.Thread(target=list, args=(job,)) for job in jobs]
    for thread in waiting:
        thread.start()
    assert asked.get(timeout=20) > 0
    assert ask(engine, prompt(9, 20))[0] == expected(prompt(9, 20)), "somebody else is answered"
    go.set()
    for thread in waiting:
        thread.join(20)
    assert [job.answers[0].token_ids for job in jobs] == [answer, answer]
    assert [job.usage.cached_tokens for job in jobs] == [88, 88] and asked.empty()
    assert engine.metrics().tiers["host_hits_total"] == 1 and engine.admin.check_invariants() == []
    engine.close()


def test_a_host_without_memory_loses_what_does_not_fit(monkeypatch, tmp_path):
    """Less than it was to give, and none for what comes from files: everything is computed again."""
    engine = make(small(disk=tmp_path))
    first = ask(engine, prompt(0))
    engine.close()

    def none(self):
        raise CapacityError("no memory")

    monkeypatch.setattr(memory.HostMemory, "_grow", none)
    engine = make(small(disk=tmp_path))
    answers = [ask(engine, prompt(seed)) for seed in (0, 1, 2, 3, 0)]
    assert answers[0] == answers[-1] == (first[0], 0)
    assert engine.metrics().tiers["host_refused_total"] >= 3 and engine.admin.check_invariants() == []
    engine.close()


def test_places_in_the_hosts_memory(monkeypatch):
    """Neighbours are copied together; a place is free again when its page is gone, and not before."""
    monkeypatch.setattr(memory, "FIRST_BLOCK", 30)
    host = memory.HostMemory(10, pinned=False)
    pages = host.take(9)  # blocks of 3 and 6 places
    assert [len(block) for block in host.blocks] == [3, 6] and len({(page.block, page.place) for page in pages}) == 9
    for number, page in enumerate(pages):
        page.buffer()[:] = bytes([number] * 10)
    assert list(memory.runs([4, 5, 6, 7, 8, 9, 1, 2, 3], pages)) == [(4, 0, 0, 3), (7, 1, 0, 3), (1, 1, 3, 3)]
    assert list(memory.runs([4, 6], pages[:2])) == [(4, 0, 0, 1), (6, 0, 1, 1)]
    assert list(memory.runs([4, 5], [pages[0], pages[2]])) == [(4, 0, 0, 1), (5, 0, 2, 1)]
    assert list(memory.runs([], [])) == []
    kept = pages[2]
    del pages, page
    again = host.take(8)
    assert len(host.blocks) == 2 and (kept.block, kept.place) not in {(page.block, page.place) for page in again}
    assert bytes(kept.buffer()) == bytes([2] * 10)


def test_memory_is_taken_before_the_first_request(monkeypatch, tmp_path):
    """In pieces between which the engine goes on: all of the host tier, and what the longest prefix needs on its way from a disk."""
    engine, counts = make(small(disk=tmp_path)), []
    shape = engine.core.cache.geometry
    monkeypatch.setattr(tiers, "RESERVED_AT_ONCE", 7 * shape.page_bytes)
    monkeypatch.setattr(engine.core.runner.pool, "reserve_host", counts.append)
    for _, run in engine.core.tiers.preparations(130):
        run()
    assert counts[-1] == 2**22 // shape.page_bytes + shape.pages_for(130) + shape.groups and counts[0] == 7
    assert all(0 < more - before <= 7 for before, more in zip(counts, counts[1:]))
    engine.close()
    monkeypatch.setattr(memory, "FIRST_BLOCK", 30)
    host = memory.HostMemory(10, pinned=False)
    kept = host.take(2)
    host.reserve(9)
    held = len(host.blocks)
    host.reserve(5)
    assert len(host.blocks) == held == 2 and len([*kept, *host.take(7)]) == 9 and len(host.blocks) == held


def test_bytes_come_back_as_they_were():
    """Restored pages equal the evicted ones, so the scores behind them are bitwise those of a hit in the pool."""
    model = tiny_model(dtype=torch.float32)
    scores = []

    def run(settings, evict):
        engine = LocalEngine(model, TOKENIZER, name="m", context_length=130, settings=settings)
        ask(engine, prompt(0))
        for seed in range(1, 5) if evict else ():
            ask(engine, prompt(seed))
        step = engine.core.runner.run
        engine.core.runner.run = lambda *plan: scores.append(step(*plan)) or scores[-1]
        assert ask(engine, prompt(0))[1] == 88
        kept = [next(iter(one.logits.values())) for one in scores]
        scores.clear()
        return torch.stack(kept)

    assert torch.equal(run(small(), True), run(EngineSettings(unit=4, cache_bytes=2**22), False))
