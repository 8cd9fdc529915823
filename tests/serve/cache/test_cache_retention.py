"""Where policies want checkpoints, against the definition; and what conversations gain from each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import Bench, text

from perilune.errors import ConfigError
from perilune.serve.cache import Retention


@pytest.mark.parametrize(
    "given_, told",
    [
        ("tail", "tail"), ("dense", "dense"), ("turns", "turns"), ("second-hit", "second-hit"),
        ("interval:64", "interval:64"), ("interval:64+turns", "turns+interval:64"), ("tail + turns", "turns"),
        ("second-hit+turns", "turns+second-hit"),
    ],
)  # fmt: skip
def test_policies_by_name(given_, told):
    policy = Retention.parse(given_)
    assert str(policy) == told and Retention.parse(str(policy)) == policy
    assert str(Retention()) == "turns+second-hit"


@pytest.mark.parametrize(
    "given_", ["", "all", "interval", "interval:0", "interval:-3", "interval:x", "turns:3", "tail+", "dense:2"]
)
def test_other_names_are_refused(given_):
    with pytest.raises(ConfigError, match="allowed: dense, tail, turns, second-hit, interval:N"):
        Retention.parse(given_)


@given(
    policy=st.sampled_from(("tail", "turns", "second-hit", "dense", "interval:8", "interval:6", "turns+second-hit+interval:12")),
    start=st.integers(0, 60), length=st.integers(1, 40), unit=st.sampled_from((1, 4, 8)), prompt=st.integers(1, 80),
    turns=st.lists(st.integers(0, 80), max_size=4), junction=st.integers(0, 10),
)  # fmt: skip
def test_points_are_those_of_the_definition(policy, start, length, unit, prompt, turns, junction):
    rule, end = Retention.parse(policy), start + length
    turns, junction = sorted(turns), junction * unit
    points = dict(rule.points(start, end, unit=unit, prompt=prompt, turn_ends=turns, junction=junction))
    wanted = {end // unit * unit, (prompt - 1) // unit * unit}
    if rule.turns:
        wanted |= {turn // unit * unit for turn in turns}
    if rule.second_hit:
        wanted.add(junction)
    if rule.interval:
        wanted |= {number * rule.interval // unit * unit for number in range(200)}
    if rule.dense:
        wanted |= set(range(0, 200, unit))
    assert set(points) == {point for point in wanted if start < point <= end}
    if (prompt - 1) // unit * unit in points:
        assert points[(prompt - 1) // unit * unit] == "tail"
    recycled = [point for point, reason in points.items() if reason in ("rolling", "decode")]
    assert recycled in ([], [end // unit * unit]), "only the last point of a pass is recycled"


def conversation(policy: str) -> dict[str, int]:
    """System prompt of 30 tokens, two turns, an edit of the second, another user with the same system prompt."""
    bench, system = Bench(pages=200, policy=policy), text(0, 30)
    one = system + text(100, 21)
    two = one + text(200, 25)
    edited = one + text(300, 18)
    others = [system + text(at, 15) for at in (400, 500)]
    found = {}
    for name, prompt, ends in (
        ("first", one, (30, 51)), ("same", one, (30, 51)), ("next", two, (30, 51, 76)), ("edited", edited, (30, 51, 69)),
        ("other user", others[0], (30, 45)), ("third user", others[1], (30, 45)),
    ):  # fmt: skip
        found[name] = bench.serve(name, prompt, ends, chunk=16)
    return found


@pytest.mark.parametrize(
    "policy, hits",
    [
        ("tail", (0, 48, 48, 48, 0, 0)),
        ("turns", (0, 48, 48, 48, 28, 28)),
        ("second-hit", (0, 48, 48, 48, 0, 28)),
        ("interval:24", (0, 48, 48, 48, 24, 24)),
        ("dense", (0, 48, 48, 48, 28, 28)),
        ("turns+second-hit", (0, 48, 48, 48, 28, 28)),
    ],
)
def test_what_a_conversation_skips(policy, hits):
    assert tuple(conversation(policy).values()) == hits


def test_superseded_checkpoints_are_recycled():
    """30 passes over a prompt and its reply leave the tail, the message end and the last of the reply."""
    bench, prompt = Bench(), text(0, 45)
    chain = bench.chain(prompt)
    bench.cache.admit("a", chain, (22, 45))
    tokens = list(prompt)
    for _ in range(15):
        bench.cache.finish_step(bench.chunk("a", tokens, 3)[0])
    for token in range(70, 91):
        tokens.append(token)
        chain.extend([token])
        bench.cache.finish_step(bench.chunk("a", tokens, 1)[0])
    bench.cache.release("a")
    depths = sorted((node.depth, node.checkpoint.reason) for node in bench.cache.store.checkpoints.values())
    assert depths == [(20, "turn"), (44, "tail"), (64, "decode")]
    counters = bench.cache.metrics().counters
    assert (counters.checkpoints_recycled["rolling"], counters.checkpoints_recycled["decode"]) == (9, 4)
    assert bench.resume([*tokens, 1]) == 64


def test_a_rolling_checkpoint_that_served_a_hit_stays():
    bench, prompt = Bench(policy="tail"), text(0, 41)
    bench.admit("a", prompt)
    bench.cache.finish_step(bench.chunk("a", prompt, 16)[0])
    assert bench.serve("b", text(0, 18)) == 16
    bench.cache.finish_step(bench.chunk("a", prompt, 25)[0])
    assert bench.resume(text(0, 20)) == 16


def both_admitted(longer: int) -> Bench:
    """Requests a and b with one beginning, both cold; a has passed token 16 and left its rolling checkpoint there."""
    bench = Bench(policy="tail")
    bench.admit("a", text(0, 41))
    bench.admit("b", text(0, longer))
    bench.cache.finish_step(bench.chunk("a", text(0, 41), 16)[0])
    assert [node.depth for node in bench.cache.store.checkpoints.values()] == [16]
    return bench


def test_the_end_of_another_prompt_is_not_recycled():
    bench = both_admitted(17)
    step, chunk = bench.chunk("b", text(0, 17), 17)
    assert not chunk.exports, "a checkpoint is there already"
    bench.cache.finish_step(step)
    bench.cache.finish_step(bench.chunk("a", text(0, 41), 25)[0])
    assert bench.resume(text(0, 17)) == 16


def test_a_rolling_checkpoint_goes_with_the_last_request_that_passed_it():
    bench = both_admitted(38)
    bench.cache.finish_step(bench.chunk("b", text(0, 38), 16)[0])
    bench.cache.finish_step(bench.chunk("a", text(0, 41), 25)[0])
    assert bench.resume(text(0, 17)) == 16, "b may still be preempted"
    bench.cache.finish_step(bench.chunk("b", text(0, 38), 22)[0])
    assert bench.resume(text(0, 17)) == 0
    assert bench.cache.metrics().counters.checkpoints_recycled["rolling"] == 1


def test_a_request_recycles_only_its_own():
    """Its checkpoint was evicted, and another request has put one at the same point since."""
    bench = both_admitted(38)
    store = bench.cache.store
    store._evict_checkpoint(next(iter(store.checkpoints.values())))
    step, chunk = bench.chunk("b", text(0, 38), 16)
    assert [export.position for export in chunk.exports] == [16]
    bench.cache.finish_step(step)
    bench.cache.finish_step(bench.chunk("a", text(0, 41), 25)[0])
    assert bench.resume(text(0, 17)) == 16


def test_a_preempted_request_goes_on_where_it_was():
    bench, prompt = Bench(policy="tail"), text(0, 60)
    bench.admit("a", prompt)
    for _ in range(3):
        bench.cache.finish_step(bench.chunk("a", prompt, 15)[0])
    bench.cache.release("a")
    assert bench.serve("a", prompt) == 44
