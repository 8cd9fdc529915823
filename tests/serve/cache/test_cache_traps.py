"""Faults that other engines had in public, each as the shortest story that shows it. H = unit of 4 tokens, page of 12."""

from __future__ import annotations

import pytest
from small_requests import Bench, H, text
from symbolic_engine import SHAPE, Mismatch, truth

from perilune.errors import CapacityError
from perilune.serve.cache import CopyPage, RestoreState, ZeroState


def test_t11_a_scheduled_chunk_that_never_ran_is_no_hit():
    """Launch a chunk of 5 H, abort before it executes, send it again: nothing was written, so nothing may be restored."""
    bench, prompt = Bench(), text(0, 5 * H + 1)
    bench.admit("a", prompt)
    step = bench.cache.begin_step()
    assert bench.cache.extend(step, "a", len(prompt)).exports
    assert bench.resume(prompt) == 0, "blocks of the running step cannot be matched"
    bench.cache.release("a")
    assert bench.resume(prompt) == 0
    bench.cache.finish_step(step)
    assert bench.resume(prompt) == 0, "an aborted request enters nothing that was still under way"
    assert bench.serve("b", prompt) == 0 and bench.serve("c", prompt) == 5 * H


def test_t12_a_fresh_state_is_zeroed():
    """Fill the pool, free it, admit a prompt that hits nothing: its state must not be a previous tenant's."""
    bench = Bench(pages=12)
    for number in range(4):
        prompt = text(100 * number, 30)
        assert bench.serve(f"r{number}", prompt) == 0  # the executor compares the state it starts from with zero
    bench.admit("x", text(900, 5))
    step = bench.cache.begin_step()
    chunk = bench.cache.extend(step, "x", 5)
    assert ZeroState(chunk.state) in chunk.operations
    assert bench.engine.memory[chunk.state[0]][0] != (0, 0), "the pages did hold something"


def test_t13_pages_without_a_checkpoint_are_no_hit():
    """Cache 3 H and more, lose the checkpoints, send it again with a suffix: no state, so no resume, although all pages match."""
    bench, prompt = Bench(), text(0, 3 * H + 2)
    bench.serve("a", prompt)
    longer = prompt + text(50, 5)
    assert bench.resume(longer) == 3 * H
    for node in list(bench.cache.store.checkpoints.values()):
        bench.cache.store.lose_checkpoint(node, "lost by the test")
    match = bench.cache.match(bench.chain(longer))
    assert (match.known, match.resume, match.node) == (3 * H, 0, None)
    assert bench.serve("b", longer) == 0
    assert bench.resume(longer) == (len(longer) - 1) // H * H


def test_t13_a_shallower_checkpoint_is_used():
    bench, prompt = Bench(policy="dense"), text(0, 6 * H + 1)
    bench.serve("a", prompt)
    node = bench.cache.match(bench.chain(prompt)).node
    bench.cache.store.lose_checkpoint(node, "lost by the test")
    assert bench.resume(prompt) == 5 * H and bench.serve("b", prompt) == 5 * H


def test_t14_siblings_of_a_long_prefix_meet_at_its_end():
    """A = prefix + tail, B, C alike: A is cold, B makes the junction, C resumes there."""
    prefix = text(0, 7 * H)
    for policy, third in (("second-hit", 7 * H), ("tail", 0)):
        bench = Bench(policy=policy)
        skipped = [bench.serve(name, prefix + text(at, 9)) for name, at in (("a", 100), ("b", 200), ("c", 300))]
        assert skipped == [0, 0, third], policy


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 12, 13, 100])
def test_t14_the_junction_does_not_depend_on_chunks(chunk):
    bench, prefix = Bench(), text(0, 7 * H)
    skipped = [
        bench.serve(name, prefix + text(at, 9), chunk=chunk) for name, at in (("a", 100), ("b", 200), ("c", 300))
    ]
    assert skipped == [0, 0, 7 * H]


def test_t15_pages_and_units_have_their_own_index():
    """A hit in the middle of a page: the table is by pages of 12 tokens, the prefix by units of 4."""
    bench, prompt = Bench(), text(0, 29)
    bench.serve("a", prompt)
    admission = bench.admit("b", prompt)
    assert admission.resume == 28 and len(admission.pages) == 3
    step, chunk = bench.chunk("b", prompt, 1)
    copy, restore = chunk.operations
    assert isinstance(copy, CopyPage) and copy.tokens == 4 and copy.target == admission.pages[2] != copy.source
    assert isinstance(restore, RestoreState) and restore.depth == 28 and len(restore.sources) == SHAPE.groups
    assert not set(restore.sources) & set(restore.targets)
    assert not bench.cache.store.pool.is_evictable(restore.sources[0]), "pinned until it has been copied"
    bench.cache.finish_step(step)
    assert bench.cache.store.pool.is_evictable(restore.sources[0])


def test_t17_pages_of_a_step_under_way_are_not_given_away():
    """A request ends while a step with it runs; a transfer asks for pages at once and writes from another stream."""
    bench, prompt = Bench(pages=2 * SHAPE.groups + 3), text(0, 30)
    bench.admit("a", prompt)
    step = bench.cache.begin_step()
    chunk = bench.cache.extend(step, "a", 30)
    bench.cache.release("a")
    used = {*chunk.pages, *chunk.state, *(page for export in chunk.exports for page in export.targets)}
    assert bench.cache.receive("t", bench.chain(text(50, 24)), 24) is None, "the pool is full until the step has ended"
    assert bench.cache.metrics().closing == 1
    bench.engine.run(chunk, truth(prompt))
    bench.cache.finish_step(step)
    incoming = bench.cache.receive("t", bench.chain(text(50, 24)), 24)
    assert incoming is not None and {*incoming.pages, *incoming.state} <= used


def test_t18_a_checkpoint_is_published_after_its_step():
    """Chunked prefill with overlap: the second chunk is planned while the first runs; each is seen when it has ended."""
    bench, prompt = Bench(), text(0, 6 * H)
    bench.admit("a", prompt)
    first = bench.cache.begin_step()
    one = bench.cache.extend(first, "a", 3 * H)
    second = bench.cache.begin_step()
    two = bench.cache.extend(second, "a", 3 * H)
    longer = prompt + [7]
    assert bench.resume(longer) == 0
    bench.engine.run(one, truth(prompt))
    bench.cache.finish_step(first)
    assert bench.resume(longer) == 3 * H
    bench.engine.run(two, truth(prompt))
    bench.cache.finish_step(second)
    assert bench.resume(longer) == 6 * H


def test_t18_steps_end_in_order():
    bench = Bench()
    bench.cache.begin_step()
    with pytest.raises(AssertionError, match="not the oldest"):
        bench.cache.finish_step(bench.cache.begin_step())


def test_t19_a_state_belongs_to_its_own_depth():
    bench, prompt = Bench(), text(0, 6 * H + 1)
    bench.serve("a", prompt)
    store = bench.cache.store
    node = store.trie.nodes[bench.chain(prompt).digests[2]]
    with pytest.raises(AssertionError, match="states of 8 tokens at a prefix of 12"):
        store.enter_checkpoint(node, store.take_state(), 8, "tail")


def test_t20_checkpoint_positions_are_each_requests_own():
    """Two prompts in one step, the first no multiple of the unit: both are cut on their own grid."""
    bench = Bench(policy="dense")
    prompts = {"a": text(0, 3 * H + 1), "b": text(50, 4 * H + 3)}
    for name, prompt in prompts.items():
        bench.admit(name, prompt)
    step = bench.cache.begin_step()
    for name, prompt in prompts.items():
        chunk = bench.cache.extend(step, name, len(prompt))
        assert [export.position for export in chunk.exports] == list(range(H, len(prompt), H))
        bench.engine.run(chunk, truth(prompt))
    bench.cache.finish_step(step)
    for name, prompt in prompts.items():
        bench.cache.release(name)
        assert bench.serve(f"{name}2", prompt) == (len(prompt) - 1) // H * H


def test_t21_an_admission_takes_all_or_nothing():
    """Room for the tokens but not for the state; and a pool full of pinned states. The request waits, nothing is lost."""
    bench = Bench(pages=9)
    bench.serve("a", text(0, 25))
    pin = bench.cache.pin(bench.chain(text(0, 25)))
    before = bench.cache.metrics()
    assert bench.admit("b", text(50, 30)) is None
    after = bench.cache.metrics()
    assert after.counters.refused == 1
    assert (before.free, before.evictable, before.prefixes) == (after.free, after.evictable, after.prefixes)
    bench.cache.check_invariants()
    bench.cache.unpin(pin)
    assert bench.serve("b", text(50, 30)) == 0


def test_t21_a_prompt_that_can_never_fit_is_refused():
    bench = Bench(pages=6)
    with pytest.raises(CapacityError, match="needs 7 cache pages, but the pool has 6"):
        bench.admit("a", text(0, 37))


def test_a_hit_that_leaves_no_room_for_its_request_is_given_up():
    """Alone in a pool of 9 pages: the hit would pin 2 + 3 beside the 3 + 3 that it needs. Cold, it can grow to the end."""
    bench, prompt = Bench(pages=9), text(0, 21)
    bench.serve("a", prompt)
    chain, tokens = bench.chain(prompt + text(50, 24)), prompt + text(50, 24)
    assert bench.cache.match(chain).resume == 20
    assert bench.cache.admit("b", chain).resume == 0
    bench.cache.finish_step(bench.chunk("b", tokens, 45)[0])
    for token in range(80, 105):
        tokens.append(token)
        chain.extend([token])
        bench.cache.finish_step(bench.chunk("b", tokens, 1)[0])
        bench.cache.check_invariants()


def test_t22_no_page_is_lost_wherever_a_request_is_aborted():
    prompt = text(0, 30)
    for stop in ("admitted", "planned", "executed", "finished", "hit admitted", "hit planned", "failed"):
        bench = Bench()
        if stop.startswith("hit"):
            bench.serve("a", prompt)
        bench.admit("b", prompt)
        if not stop.endswith("admitted"):
            step = bench.cache.begin_step()
            chunk = bench.cache.extend(step, "b", 1)
            if stop in ("executed", "finished"):
                bench.engine.run(chunk, truth(prompt))
            if stop == "finished":
                bench.cache.finish_step(step)
            bench.cache.release("b")
            if stop == "failed":
                bench.cache.fail_step(step)
            elif stop != "finished":
                bench.cache.finish_step(step)
        else:
            bench.cache.release("b")
        bench.cache.check_invariants()
        metrics = bench.cache.metrics()
        assert metrics.free + metrics.evictable == metrics.pages, stop


def test_t23_a_transfer_counts_only_when_all_parts_are_there():
    bench, prompt = Bench(), text(0, 26)
    incoming = bench.cache.receive("t", bench.chain(prompt), 24)
    assert incoming.parts == {"tokens", "state 0", "state 1", "state 2"}
    for part in sorted(incoming.parts)[:-1]:
        assert not bench.cache.arrived("t", part)
        assert bench.resume(prompt) == 0
    assert bench.cache.arrived("t", sorted(incoming.parts)[-1])
    assert bench.resume(prompt) == 24
    bench.cache.check_invariants()


def test_a_transfer_brings_only_what_is_missing():
    bench, prompt = Bench(), text(0, 26)
    bench.serve("a", prompt)
    with pytest.raises(AssertionError, match="cached already"):
        bench.cache.receive("t", bench.chain(prompt), 24)
    bench.cache.store.lose_checkpoint(bench.cache.match(bench.chain(prompt)).node, "lost by the test")
    incoming = bench.cache.receive("t", bench.chain(prompt), 24)
    assert (incoming.start, incoming.end, incoming.pages) == (24, 24, ())
    assert incoming.parts == {"state 0", "state 1", "state 2"}
    longer = bench.cache.receive("u", bench.chain(text(0, 32)), 32)
    assert (longer.start, longer.end, len(longer.pages)) == (24, 32, 1)
    bench.cache.check_invariants()


def test_t23_a_failed_transfer_leaves_nothing():
    bench, prompt = Bench(), text(0, 26)
    incoming = bench.cache.receive("t", bench.chain(prompt), 24)
    bench.cache.arrived("t", "state 1")
    bench.cache.cancel_transfer("t")
    assert bench.resume(prompt) == 0 and bench.cache.metrics().free == 60 and incoming.start == 0
    bench.cache.check_invariants()


def test_t24_rejected_drafts_leave_no_mark():
    """A window of 4 tokens across a boundary, 1 stands: no prefix, no checkpoint, and the next chunk begins behind it."""
    bench, prompt = Bench(), text(0, 6)
    chain = bench.chain(prompt)
    bench.cache.admit("a", chain)
    bench.cache.finish_step(bench.chunk("a", prompt, 6)[0])
    step, chunk = bench.chunk("a", [*prompt, 90, 91, 92, 93], 4)
    assert [export.position for export in chunk.exports] == [8]
    chain.extend([60])
    bench.cache.finish_step(step, kept={"a": 1})
    assert bench.resume([*prompt, 60, 61, 62]) == 4 and bench.resume([*prompt, 90, 91, 92]) == 4
    step = bench.cache.begin_step()
    assert (chunk := bench.cache.extend(step, "a", 1)) and (chunk.start, chunk.end) == (7, 8)
    bench.cache.check_invariants()


def test_t31_new_weights_never_meet_old_states():
    bench, prompt = Bench(), text(0, 30)
    assert [bench.serve("a", prompt, weights=1), bench.serve("b", prompt, weights=2)] == [0, 0]
    assert bench.serve("c", prompt, weights=1) == 28
    bench.cache.reset()
    assert bench.serve("d", prompt, weights=1) == 0


def test_t31_a_request_that_outlives_a_reset_enters_nothing():
    bench, prompt = Bench(), text(0, 30)
    bench.admit("a", prompt)
    bench.cache.reset()
    bench.cache.finish_step(bench.chunk("a", prompt, 30)[0])
    assert bench.resume(prompt) == 0
    bench.cache.release("a")
    assert bench.cache.metrics().free == 60
    bench.cache.check_invariants()


def test_t52_the_end_of_a_request_does_not_take_its_checkpoints():
    bench, prompt = Bench(), text(0, 30)
    assert bench.serve("a", prompt) == 0
    assert bench.serve("b", prompt) == 28, "an identical prompt computes at least one token"
    assert bench.serve("c", text(0, 29)) == 28


def test_an_identical_prompt_that_ends_with_a_unit():
    bench = Bench(policy="tail")
    assert [bench.serve(name, text(0, 28)) for name in "abc"] == [0, 24, 24]


def test_t54_tenants_share_nothing():
    bench, prompt = Bench(), text(0, 30)
    for name, root in {"a": {"salt": "x"}, "b": {"salt": "y"}, "c": {"lora": "x"}, "d": {}}.items():
        assert bench.serve(name, prompt, **root) == 0
        assert bench.serve(name, prompt, **root) == 28


def test_the_executor_notices_a_wrong_byte():
    """The oracle of this file itself."""
    bench, prompt = Bench(), text(0, 30)
    bench.serve("a", prompt)
    for page in bench.engine.memory:
        page[0] = "wrong"
    with pytest.raises(Mismatch):
        bench.serve("b", prompt)
