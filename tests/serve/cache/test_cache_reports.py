"""Metrics add up, explanations name the boundary and the component, and the invariants see what is planted."""

from __future__ import annotations

from dataclasses import fields

import pytest
from small_requests import Bench, text
from symbolic_engine import SHAPE, Driver

from perilune.errors import RequestError
from perilune.serve.cache.explain import Losses


def test_tokens_are_counted_by_component():
    bench = Bench(policy="second-hit")
    prefix = text(0, 28)
    for at in (100, 200, 300):
        bench.serve(f"r{at}", prefix + text(at, 9))
    counters = bench.cache.metrics().counters
    assert (counters.requests, counters.prompt_tokens) == (3, 111)
    assert (counters.tokens_hit, counters.tokens_without_state, counters.tokens_missed) == (28, 28, 55)
    assert counters.checkpoints_created["junction"] == counters.checkpoints_used["junction"] == 1
    assert counters.checkpoints_created["tail"] == 3 and (counters.copies, counters.tokens_copied) == (1, 4)


def test_pages_are_counted_by_use():
    driver = Driver(3, pages=60)
    for _ in range(600):
        driver.step()
        m = driver.cache.metrics()
        assert m.pages == m.free + m.tokens_private + m.tokens_cached + m.state_private + m.state_cached
        assert m.used == 1 - (m.free + m.evictable) / 60 and m.checkpoints * SHAPE.groups == m.state_cached
        assert m.requests == len(driver.running) and m.page_bytes == SHAPE.page_bytes
    counters = driver.cache.metrics().counters
    assert counters.tokens_hit + counters.tokens_without_state + counters.tokens_missed == counters.prompt_tokens
    created, gone = (sum(getattr(counters, name).values()) for name in ("checkpoints_created", "checkpoints_evicted"))
    assert created - gone - sum(counters.checkpoints_recycled.values()) == driver.cache.metrics().checkpoints


def test_a_snapshot_stays_as_it_was():
    bench = Bench()
    before = bench.cache.metrics()
    bench.serve("a", text(0, 30))
    assert before.counters.requests == 0 == sum(before.counters.checkpoints_created.values())
    assert {field.name for field in fields(before.counters)} >= {"tokens_hit", "tokens_without_state", "tokens_missed"}


def test_explanations():
    bench, prompt = Bench(policy="tail"), text(0, 30)
    why = bench.cache.explain(bench.chain(prompt))
    assert (why.resume, why.tokens_failed, why.state_failed) == (0, 4, None)
    assert "boundary 4 fails: not seen, or forgotten" in str(why)

    bench.admit("a", prompt)
    step, _ = bench.chunk("a", prompt, 30)
    assert f"boundary 4 fails: step {step}, which writes it, has not finished" in str(
        bench.cache.explain(bench.chain(prompt))
    )
    bench.cache.finish_step(step)
    bench.cache.release("a")
    why = bench.cache.explain(bench.chain(prompt))
    assert (why.resume, why.known, why.tokens_failed, why.state_failed, why.checkpoints) == (28, 28, None, None, (28,))
    assert "28 of 30 prompt tokens are skipped\npages: cached up to 28, the deepest a hit can be" in str(why)

    fork = prompt[:18] + text(50, 10)
    why = bench.cache.explain(bench.chain(fork))
    assert (why.known, why.resume, why.tokens_failed, why.state_failed) == (16, 0, 20, 16)
    assert "states: boundary 16 fails: no checkpoint was taken there; checkpoints at: none" in str(why)

    assert bench.cache.store.make_room(bench.cache.store.pool.pages)
    assert "boundary 4 fails: tokens evicted" in str(bench.cache.explain(bench.chain(prompt)))
    assert "other tokens, images, weights, adapter or salt" in str(bench.cache.explain(bench.chain(prompt, salt="x")))


def test_an_explanation_tells_an_evicted_checkpoint():
    bench, prompt = Bench(), text(0, 30)
    bench.serve("a", prompt)
    store = bench.cache.store
    store._evict_checkpoint(next(iter(store.checkpoints.values())))
    why = bench.cache.explain(bench.chain(prompt))
    assert (why.resume, why.state_failed, why.state_why) == (0, 28, "checkpoint evicted")
    counters = bench.cache.metrics().counters
    assert (counters.checkpoints_evicted["tail"], counters.checkpoints_unused) == (1, 1)


def test_losses_are_remembered_up_to_a_limit():
    losses = Losses(limit=2)
    for name in (b"a", b"b", b"a", b"c"):
        losses.note(name, "gone")
    assert (losses.get(b"a"), losses.get(b"b"), losses.get(b"c")) == ("gone", None, "gone")


def test_events_tell_a_router_what_is_cached():
    bench, seen = Bench(policy="tail"), set()

    def listen(event):
        key = event.component, event.depth, event.digest
        seen.add(key) if event.stored else seen.remove(key)

    bench.cache.store.on_event = listen
    bench.serve("a", text(0, 30))
    assert {key[:2] for key in seen} == {("tokens", depth) for depth in range(4, 29, 4)} | {("state", 28)}
    assert bench.cache.store.make_room(60) and not seen


BREAKAGES = {
    "a holder too many": lambda store, lease, marked, end: store.pool.hold(lease.pages[0]),
    "a page freed in use": lambda store, lease, marked, end: store.pool._free.append(lease.pages[0]),
    "a binding lost": lambda store, lease, marked, end: store.pool._bindings.__setitem__(end.page, 99),
    "a checkpoint of another prefix": lambda store, lease, marked, end: setattr(marked.checkpoint, "depth", 3),
    "a group missing": lambda store, lease, marked, end: setattr(
        marked.checkpoint, "pages", marked.checkpoint.pages[:-1]
    ),
    "a parent gone": lambda store, lease, marked, end: store.trie.nodes.pop(end.parent.digest),
    "a user forgotten": lambda store, lease, marked, end: setattr(end, "users", 1),
    "a page twice in a table": lambda store, lease, marked, end: lease.pages.append(lease.pages[0]),
    "an evictable page miscounted": lambda store, lease, marked, end: setattr(store.pool, "evictable", 99),
}


def planted(name):
    """A cache with running requests, in which one thing has been broken."""
    driver = Driver(5, pages=60)
    for _ in range(400):
        driver.step()
    cache, store = driver.cache, driver.cache.store
    while not (
        driver.running and store.checkpoints and any(n.is_loose and n.depth > 4 for n in store.trie.nodes.values())
    ):
        driver.step()
    driver.check()
    lease, marked = next(iter(cache._leases.values())), next(iter(store.checkpoints.values()))
    end = next(node for node in store.trie.nodes.values() if node.is_loose and node.depth > 4)
    BREAKAGES[name](store, lease, marked, end)
    return cache


@pytest.mark.parametrize("name", BREAKAGES)
def test_invariants_see_what_is_broken(name):
    with pytest.raises((AssertionError, KeyError)):
        planted(name).check_invariants()


@pytest.mark.parametrize("name", ["a binding lost", "a checkpoint of another prefix", "a group missing"])
def test_a_sample_sees_it_sooner_or_later(name):
    cache = planted(name)
    with pytest.raises(AssertionError):
        for _ in range(200):
            cache.check_invariants(sample=8)


def test_what_a_caller_gets_wrong():
    bench = Bench()
    with pytest.raises(RequestError, match="an empty prompt"):
        bench.admit("a", [])
    with pytest.raises(RequestError, match="message ends 3 to 31 do not lie in the prompt's 0 to 30 tokens"):
        bench.admit("a", text(0, 30), (31, 3))
    bench.admit("a", text(0, 30))
    with pytest.raises(AssertionError, match="running already"):
        bench.admit("a", text(0, 30))
    step = bench.cache.begin_step()
    bench.cache.extend(step, "a", 3)
    with pytest.raises(AssertionError, match="twice in step"):
        bench.cache.extend(step, "a", 3)
    bench.cache.fail_step(step)
    with pytest.raises(AssertionError, match="in a step that failed"):
        bench.cache.extend(bench.cache.begin_step(), "a", 3)
    assert bench.cache.metrics().counters.steps_failed == 1


def test_a_pin_protects_until_it_is_undone():
    bench, prompt = Bench(pages=20), text(0, 30)
    assert bench.cache.pin(bench.chain(prompt)) is None
    bench.serve("a", prompt)
    pin = bench.cache.pin(bench.chain(prompt))
    assert pin.tokens == 28 and len(pin.table) == 3 and len(pin.state) == SHAPE.groups
    assert not bench.cache.store.make_room(20 - len(pin.held) + 1)
    assert bench.cache.store.make_room(20 - len(pin.held)) and bench.resume(prompt) == 28
    bench.cache.unpin(pin)
    assert bench.cache.store.make_room(20) and bench.resume(prompt) == 0
