"""What a step holds: shares of classes, priorities, slots, room for those that wait. Steps are settled without a model."""

from __future__ import annotations

import pytest

from perilune.errors import ConfigError
from perilune.serve.cache import CacheGeometry, HybridCache, RootKey, TokenChain
from perilune.serve.schedule import Limits, Scheduler, Sequence, ServiceClass, service_classes
from perilune.serve.schedule.classes import class_of
from perilune.serve.schedule.pace import RECENT

SHAPE = CacheGeometry(
    unit=4, page_tokens=12, attention_layers=2, recurrent_layers=5, token_bytes=10, state_bytes=100, heads=5
)
CLASSES = (
    ServiceClass(name="short", up_to=40, tokens=0.3, slots=0.25),
    ServiceClass(name="long", up_to=10**6, tokens=0.2, cap=0.5),
)
ONE = (ServiceClass(name="all", up_to=10**6),)


class Desk:
    """A scheduler whose every row says 7."""

    def __init__(self, pages: int = 2000, **limits) -> None:
        limits = {"step_tokens": 64, "chunk": 64, "classes": CLASSES} | limits
        self.scheduler = Scheduler(HybridCache(SHAPE, pages), Limits(**limits))
        self.count = 0

    def add(self, length: int, priority: int = 0, text: int | None = None) -> Sequence:
        self.count += 1
        ids = [self.count if text is None else text] * length
        sequence = Sequence(f"s{self.count}", ids, TokenChain(RootKey(model="m"), 4, ids), priority=priority)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.finish(plan, {row.sequence.name: 7 for row in plan.rows})
            self.scheduler.cache.check_invariants()
        return plan

    def steps_until(self, sequence: Sequence) -> int:
        for number in range(1, 1000):
            self.step()
            if sequence.drawn:
                return number
        raise AssertionError(f"{sequence} never speaks")


def test_a_short_prompt_does_not_wait_behind_long_ones():
    waits = {}
    for name, classes in (("classes", CLASSES), ("one queue", ONE)):
        desk = Desk(classes=classes)
        for _ in range(4):
            desk.add(600)
        desk.step()
        waits[name] = desk.steps_until(desk.add(20))
    assert waits["classes"] <= 2 < 30 < waits["one queue"]


def machine(base: float, each: float):
    """Seconds of so many tokens."""
    return lambda tokens: base + each * tokens


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        (machine(5e-3, 1e-4), 64, 96),
        (machine(8e-3, 1e-6), 500, 512),
    ],  # a CPU; a GPU, for which 512 tokens cost hardly more
)
def test_pieces_of_long_prompts_take_as_long_as_a_short_one(seconds, least, most):
    """As long as short ones keep coming; a long one that is alone has the whole step."""
    desk = Desk(pages=20_000, step_tokens=512, chunk=512)
    long = desk.add(200_000)

    def step():
        plan = desk.scheduler.plan()
        for stage, rows in enumerate(plan.stages):
            desk.scheduler.took(plan, stage, seconds(sum(row.chunk.end - row.chunk.start for row in rows)))
        desk.scheduler.finish(plan, {row.sequence.name: 7 for row in plan.rows})
        return plan

    assert step().tokens == 512
    for _ in range(6):
        for sizes in ([1], [1], [1], [1, 1]):  # it waits for three steps, and then goes behind what the short one draws
            short = desk.add(30)
            plan = step()
            assert short.drawn and [len(rows) for rows in plan.stages] == sizes
            desk.scheduler.end(short)
        pieces = [step().tokens for _ in range(8)]
    assert all(least <= tokens <= most for tokens in pieces[-4:])
    assert max([step().tokens for _ in range(RECENT)][RECENT // 2 :]) == 512, "nobody short has come for a while"
    assert long.scheduled < 200_000


def test_nobody_begins_a_crumb_while_others_compute():
    """A piece that ends between two checkpoints' places would put all that follows off the kernels' grid."""
    desk = Desk(classes=ONE)
    talking = [desk.add(5) for _ in range(3)]
    desk.step()
    first, second, third = desk.add(200), desk.add(200), desk.add(2)
    plan = desk.step()
    assert len(plan.decode) == 3
    assert [(row.sequence, row.chunk.end) for row in plan.prefill] == [(first, 60)], "61 tokens of room: one is a crumb"
    assert third.scheduled == 0, "what comes later does not overtake"
    pieces = []
    while not (first.drawn and second.drawn and third.drawn):
        plan = desk.step()
        pieces += [(row.chunk.start, row.chunk.end) for row in plan.prefill if row.sequence in (first, second)]
    assert all(place % 4 == 0 or place == 200 for piece in pieces for place in piece), pieces
    for sequence in talking:
        assert sequence.drawn > 3


@pytest.mark.parametrize("piece", [8, 10])
def test_medium_and_long_prompts_take_turns_while_short_ones_keep_coming(piece):
    """A piece is all of one class; and longer ones go in every fourth step, always an even or always an odd one."""
    classes = (
        ServiceClass(name="short", up_to=40, tokens=0.3),
        ServiceClass(name="medium", up_to=400, tokens=0.2, cap=0.75),
        ServiceClass(name="long", up_to=10**6, tokens=0.2, cap=0.5),
    )
    desk = Desk(pages=20_000, classes=classes, step_tokens=512, chunk=512)
    desk.scheduler.pace.tokens = piece
    medium, long = desk.add(400), desk.add(100_000)
    for _ in range(80):
        short = desk.add(30)
        desk.step()
        assert short.drawn
        desk.scheduler.end(short)
    assert medium.scheduled == long.scheduled == 10 * 8


def test_a_class_with_a_share_below_a_piece_gets_it_nevertheless():
    classes = (ServiceClass(name="busy", up_to=400, tokens=0.5), ServiceClass(name="other", up_to=10**6, tokens=0.04))
    desk = Desk(pages=20_000, classes=classes)
    other = desk.add(10_000)
    for _ in range(50):
        desk.add(300)
        desk.step()
    assert other.scheduled >= 50 * int(0.04 * 64)


def test_where_a_step_is_shorter_than_that_pieces_are_as_long_as_they_can_be():
    desk = Desk(classes=ONE, step_tokens=3)
    first, second = desk.add(20), desk.add(20)
    assert desk.steps_until(second) < 20 and first.drawn


def test_long_ones_do_not_wait_for_short_ones_that_cannot_begin():
    desk = Desk(sequences=1)
    long = desk.add(600)
    desk.step()
    desk.add(20)
    before = long.scheduled
    assert desk.step() is not None and long.scheduled > before, "there is no slot for the short one"


def test_a_class_that_is_alone_takes_the_whole_step():
    desk = Desk()
    desk.add(600)
    assert desk.step().tokens == 64
    desk.add(30)
    assert sum(row.chunk.end - row.chunk.start for row in desk.step().prefill if row.sequence.prompt > 40) <= 32


def test_decoding_comes_first_and_shares_the_step():
    desk = Desk()
    first = desk.add(8)
    desk.steps_until(first)
    long = desk.add(600)
    plan = desk.step()
    assert [row.sequence for row in plan.decode] == [first] and [row.sequence for row in plan.prefill] == [long]
    assert plan.tokens <= 64


def test_slots_are_kept_for_short_ones():
    desk = Desk(sequences=8)
    longs = [desk.add(50) for _ in range(12)]
    for _ in range(30):
        desk.step()
    assert sum(s.state == "running" for s in longs) == 6
    shorts = [desk.add(10) for _ in range(2)]
    desk.step()
    assert [s.state for s in shorts] == ["running"] * 2 and len(desk.scheduler.running) == 8


def test_lower_numbers_go_first():
    desk = Desk(classes=ONE, sequences=1)
    desk.step()
    order = [desk.add(10, priority) for priority in (2, 0, 1, 0)]
    assert [desk.scheduler.queues.position(s) for s in order] == [3, 0, 2, 1]
    ended = []
    while len(ended) < 4:
        desk.step()
        for sequence in list(desk.scheduler.running.values()):
            if sequence.drawn:
                desk.scheduler.end(sequence)
                ended.append(sequence)
    assert ended == [order[1], order[3], order[2], order[0]]


def test_a_more_important_one_takes_the_place_of_a_lesser_one():
    desk = Desk(classes=ONE, sequences=1)
    lesser = desk.add(30, priority=1)
    desk.steps_until(lesser)
    urgent = desk.add(10, priority=0)
    assert desk.steps_until(urgent) == 1 and lesser.state == "waiting" and lesser.preemptions == 1
    desk.scheduler.end(urgent)
    desk.step()
    assert lesser.scheduled > 30 and lesser.drawn >= 2, "it went on from what was cached, with what it had said"


def test_a_large_one_gets_its_pages_at_last():
    """Small ones may overtake it only so often."""
    desk = Desk(pages=60, classes=ONE, step_tokens=400, chunk=400)
    small = [desk.add(30) for _ in range(6)]
    desk.step()
    large = desk.add(400)
    for _ in range(400):
        desk.step()
        if large.state != "waiting":
            break
        for sequence in list(desk.scheduler.running.values()):
            if sequence.drawn > 1:
                desk.scheduler.end(sequence)
                small.append(desk.add(30))
    assert large.state == "running"


def test_what_can_never_fit_is_refused_and_said_so():
    desk = Desk(pages=20)
    never, fits = desk.add(400), desk.add(50)
    desk.step()
    ((refused, error),) = desk.scheduler.refused
    assert refused is never and "needs" in str(error) and fits.state == "running"


def test_on_a_grid_chunks_do_not_depend_on_the_company():
    def cuts(others: int) -> list[int]:
        desk = Desk(grid=8, step_tokens=24)
        sequence = desk.add(45)
        for _ in range(others):
            desk.add(33)
        ends = []
        while not sequence.drawn:
            plan = desk.step()
            ends += [row.chunk.end for row in plan.prefill if row.sequence is sequence]
        return ends

    assert cuts(0) == cuts(3) == cuts(9) == [8, 16, 24, 32, 40, 45]


def test_classes():
    assert [kind.up_to for kind in service_classes(2**20)][:2] == [2048, 32768]
    assert [class_of(length, CLASSES) for length in (1, 40, 41, 10**7)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="reserve 1.20"):
        Limits(classes=(ServiceClass(name="a", up_to=1, slots=0.6), ServiceClass(name="b", up_to=2, slots=0.6)))
    with pytest.raises(ConfigError, match="ascending"):
        Limits(classes=(ServiceClass(name="a", up_to=2), ServiceClass(name="b", up_to=1)))
    with pytest.raises(ConfigError, match="share"):
        ServiceClass(name="a", up_to=1, cap=1.5)
    with pytest.raises(ConfigError, match="sequences=0"):
        Limits(sequences=0)
