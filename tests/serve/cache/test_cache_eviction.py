"""What goes first when pages run out, what is refused, and that reports say what happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_requests import Bench, text
from symbolic_engine import SHAPE

from perilune.config.presets import k2_nano
from perilune.errors import ConfigError
from perilune.serve.cache import HybridCache, Retention, RootKey, TokenChain, cache_geometry
from perilune.serve.cache.block_pool import BlockPool


def depths(bench: Bench) -> list[int]:
    return sorted(node.depth for node in bench.cache.store.checkpoints.values())


def squeeze(bench: Bench, pages: int) -> None:
    """Evict until so many pages are free."""
    assert bench.cache.store.make_room(pages)
    bench.cache.check_invariants()


def test_a_long_prefix_outlives_a_short_one_of_the_same_age():
    bench = Bench(pages=40)
    bench.serve("long", text(0, 61))
    bench.serve("short", text(100, 9))
    free = bench.cache.metrics().free
    squeeze(bench, free + 1)
    assert bench.resume(text(0, 61)) == 60 and bench.resume(text(100, 9)) == 0


def test_by_recency_the_older_one_goes():
    bench = Bench(pages=40)
    bench.cache = HybridCache(SHAPE, 40, bench.cache.retention, "recency")
    bench.serve("long", text(0, 61))
    bench.serve("short", text(100, 9))
    squeeze(bench, bench.cache.metrics().free + 1)
    assert bench.resume(text(0, 61)) == 0 and bench.resume(text(100, 9)) == 8


def test_tokens_behind_the_last_checkpoint_go_first():
    bench = Bench(pages=60)
    bench.serve("a", text(0, 61))
    store = bench.cache.store
    for node in list(store.checkpoints.values()):
        if node.depth == 60:
            store.lose_checkpoint(node, "lost by the test")
    bench.serve("b", text(0, 13))
    before = bench.cache.match(bench.chain(text(0, 62)))
    assert before.known == 60
    squeeze(bench, bench.cache.metrics().free + 2)
    after = bench.cache.match(bench.chain(text(0, 62)))
    assert after.known < 60 and after.resume == before.resume == 12


def test_crowded_checkpoints_are_thinned():
    """A checkpoint at each of 15 units: the inner ones go before the last, and no gap becomes much wider than another."""
    bench = Bench(pages=80, policy="dense")
    bench.serve("a", text(0, 61))
    assert depths(bench) == list(range(4, 61, 4))
    squeeze(bench, bench.cache.metrics().free + 7 * SHAPE.groups)
    left = depths(bench)
    assert len(left) == 8 and left[-1] == 60
    assert max(b - a for a, b in zip([0, *left], left)) <= 12


def test_the_end_of_a_prefix_outlives_its_inside():
    """Checkpoints at 8, 16 and 24 save 8 tokens each, the one at the end only 4: but that is where the next turn comes."""
    bench = Bench(pages=40, policy="interval:8")
    bench.serve("a", text(0, 29))
    assert depths(bench) == [8, 16, 24, 28]
    squeeze(bench, bench.cache.metrics().free + 1)
    assert len(depths(bench)) == 3 and depths(bench)[-1] == 28


def test_pages_that_nothing_else_needs_count_as_bytes():
    """The longest prefix saves most, but all its pages come free with it; the others share theirs."""
    bench = Bench(pages=60, policy="tail")
    shared, alone = text(0, 60), text(300, 73)
    for name, prompt in (("a", shared + text(100, 5)), ("b", shared + text(200, 5)), ("c", alone)):
        bench.serve(name, prompt)
    squeeze(bench, bench.cache.metrics().free + 1)
    assert bench.resume(alone) == 0
    assert bench.resume(shared + text(100, 5)) == bench.resume(shared + text(200, 5)) == 64


def test_a_junction_outlives_a_message_end():
    """Neither was ever hit, but the one has been seen twice."""
    bench, seen_twice, once = Bench(pages=60), text(0, 28), text(200, 28)
    for name, prompt, ends in (
        ("a", seen_twice + text(50, 9), ()), ("b", seen_twice + text(70, 9), ()), ("c", once + text(90, 9), (28,))
    ):  # fmt: skip
        bench.serve(name, prompt, ends)
    assert bench.resume([*seen_twice, 7]) == bench.resume([*once, 7]) == 28
    while bench.resume([*once, 7]):
        assert bench.resume([*seen_twice, 7]) == 28
        squeeze(bench, bench.cache.metrics().free + 1)
    assert bench.resume([*seen_twice, 7]) == 28


def test_what_is_not_used_grows_old():
    """A long prefix saves more than any other, but nobody comes back to it."""
    bench = Bench(pages=40)
    bench.serve("long", text(0, 61))
    for number in range(1, 60):
        bench.serve(f"r{number}", text(100 * number, 25))
        if not bench.resume(text(0, 61)):
            break
    assert 3 < number < 59, "it outlived some, not all"


def test_what_is_hit_often_stays():
    bench = Bench(pages=60)
    for number in range(4):
        bench.serve(f"r{number}", text(100 * number, 25))
    for _ in range(3):
        bench.serve("again", text(100, 25))
    squeeze(bench, 54)
    assert [bench.resume(text(100 * number, 25)) > 0 for number in range(4)] == [False, True, False, False]


def test_nothing_is_evicted_for_a_request_that_does_not_fit_anyway():
    bench = Bench(pages=20)
    bench.serve("a", text(0, 25))
    bench.admit("b", text(50, 60))
    had = depths(bench)
    assert bench.admit("c", text(150, 60)) is None and depths(bench) == had
    assert not bench.cache.store.make_room(21)


def test_a_checkpoint_goes_with_all_its_groups():
    bench = Bench(pages=30)
    bench.serve("a", text(0, 25))
    before = bench.cache.metrics()
    bench.cache.store.lose_checkpoint(next(iter(bench.cache.store.checkpoints.values())), "lost by the test")
    after = bench.cache.metrics()
    assert after.free == before.free + SHAPE.groups and after.state_cached == 0 == bench.resume(text(0, 25))


@pytest.mark.parametrize("hot", [False, True])
def test_requests_that_enter_units_by_turns_leave_no_page_behind(hot):
    """One page names units 1 and 3 of a prefix, another unit 2: both come free, and not after what was used later."""
    bench, prompt = Bench(pages=40), text(0, 13)
    bench.cache = HybridCache(SHAPE, 40, Retention.parse("tail"), "recency")
    for name in "ab":
        bench.admit(name, prompt)
    for name, count in (("a", 4), ("b", 8), ("a", 8)):
        bench.cache.finish_step(bench.chunk(name, prompt, count)[0])
    pages = {node.depth: node.page for node in bench.cache.store.trie.nodes.values()}
    assert pages[4] == pages[12] != pages[8]
    for name in "ab":
        bench.cache.release(name)
    if hot:
        bench.serve("hot", text(100, 25))
        squeeze(bench, 40 - 2 - SHAPE.groups)  # all but the 2 pages and the checkpoint of the hot prefix
        assert bench.resume(text(100, 25)) == 24
    else:
        squeeze(bench, 40)
        assert bench.cache.metrics().free == 40


def test_a_page_in_use_does_not_block_what_hangs_between():
    """The same, while a request uses the first unit only: what is left of its page's later units makes way."""
    bench, prompt = Bench(pages=40, policy="dense"), text(0, 13)
    for name in "ab":
        bench.admit(name, prompt)
    for name, count in (("a", 4), ("b", 8), ("a", 8)):
        bench.cache.finish_step(bench.chunk(name, prompt, count)[0])
    for name in "ab":
        bench.cache.release(name)
    bench.admit("c", text(0, 6))
    bench.cache.check_invariants()
    squeeze(bench, bench.cache.store.pool.available)
    assert bench.cache.match(bench.chain(prompt)).known == 4


def test_a_model_without_states_hits_wherever_pages_are():
    shape = replace(cache_geometry(k2_nano()), unit=4, page_tokens=4)
    cache, prompt = HybridCache(shape, 20), text(0, 30)
    chain = TokenChain(RootKey(model="m"), 4, prompt)
    for name, resume in (("a", 0), ("b", 28)):
        admission = cache.admit(name, chain)
        assert (admission.resume, admission.state) == (resume, ())
        step = cache.begin_step()
        chunk = cache.extend(step, name, len(prompt) - resume)
        assert not chunk.exports and not chunk.operations
        cache.finish_step(step)
        cache.release(name)
        cache.check_invariants()
    assert cache.store.make_room(20) and cache.match(chain).resume == 0


def test_the_pool_counts():
    with pytest.raises(ConfigError, match="a cache of 0 pages"):
        BlockPool(0)
    pool = BlockPool(4)
    a, b = pool.take(2, 1)
    pool.hold(a)
    pool.bind(a)
    pool.drop(a)
    assert (pool.free, pool.evictable, pool.available) == (2, 0, 2)
    pool.drop(a)
    assert (pool.free, pool.evictable, pool.is_evictable(a)) == (2, 1, True)
    pool.drop(b)
    pool.unbind(a)
    assert (pool.free, pool.evictable) == (4, 0)
    for wrong in (pool.drop, pool.unbind, pool.hold, pool.bind):
        with pytest.raises(AssertionError):
            wrong(a)
    with pytest.raises(ConfigError, match="eviction='lru' is not known"):
        HybridCache(SHAPE, 4, None, "lru")
