"""Scheduler and cache with a model that has no floats: its state is a hash of its tokens, and so is what it says next.

The pages begin as garbage, and every token is drawn from what a page holds, not from what it should hold. So whatever is
skipped, cut, preempted, stopped or evicted, each answer must be the one that the bare model gives; and it is known at the
first token that is not.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from symbolic_engine import SHAPE, Mismatch, SymbolicEngine

from perilune.serve.cache import HybridCache, Retention, RootKey, TokenChain
from perilune.serve.cache.lease import Pin
from perilune.serve.schedule import Limits, Plan, Scheduler, Sequence, ServiceClass
from perilune.serve.tiers import Tiers

WORDS = 3
LONGEST = 66
CLASSES = (
    ServiceClass(name="short", up_to=8, tokens=0.3, slots=0.25),
    ServiceClass(name="medium", up_to=24, tokens=0.2, cap=0.8),
    ServiceClass(name="long", up_to=1000, tokens=0.1, cap=0.5),
)


def truth(tokens, version: int) -> list[int]:
    """State after 0, 1, … tokens with some weights."""
    states = [0]
    for token in tokens:
        states.append(hash((states[-1], token, version)))
    return states


class SymbolicPages:
    """Bytes for cells: each content that was ever read has a number."""

    def __init__(self, memory: SymbolicEngine) -> None:
        self._memory, self._contents = memory, []

    def read_bytes(self, pages) -> list[bytes]:
        self._contents += [list(self._memory.memory[page]) for page in pages]
        first = len(self._contents) - len(pages)
        return [number.to_bytes(SHAPE.page_bytes) for number in range(first, len(self._contents))]

    def write_bytes(self, pages, contents) -> None:
        for page, content in zip(pages, contents, strict=True):
            self._memory.memory[page] = list(self._contents[int.from_bytes(content)])


@dataclass
class Flight:
    """A step between its planning and its end, and what the device has drawn in it once it has run."""

    plan: Plan
    version: int
    drawn: dict[str, int] | None = None


class SymbolicServer:
    """Random things done to a scheduler. Each public method is one operation and draws from `self.random`.

    The device runs steps in their order, some time after they were planned; the host hears of it later still.

    Args:
        seed: of everything random.
        retention, pages, eviction: of the cache.
        grid, ahead: of the scheduler.
    """

    def __init__(
        self, seed: int, retention: str = "turns+second-hit", pages: int = 60, eviction: str = "work", grid: int = 0,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.cache = HybridCache(SHAPE, pages, Retention.parse(retention), eviction)
        limits = Limits(sequences=self.random.choice((2, 5, 8)), step_tokens=20, chunk=14, grid=grid, classes=CLASSES)
        self.scheduler = Scheduler(self.cache, limits, ahead=ahead)
        self.memory = SymbolicEngine(pages)
        self.tiers = Tiers(self.cache, SymbolicPages(self.memory), self.random.choice((0, 6000, 40000)))
        self.under_way: deque[Flight] = deque()
        self.last: dict[str, int] = {}  # what the step that ran last has drawn, as the device knows it
        self.answers: list[tuple[Sequence, list[int]]] = []  # complete ones
        self.alive: dict[str, Sequence] = {}
        self.wanted: dict[str, int] = {}
        self.longest: dict[str, int | None] = {}
        self.states: dict[str, list[int]] = {}
        self.broken: set[str] = set()  # whose running state is unknown
        self.pins: list[Pin] = []
        self.arriving: dict[str, list[str]] = {}
        self.texts: list[list[int]] = [[]]
        self.version = self.count = 0
        self.seen: Counter[str] = Counter()

    # ---- requests

    def _prompt(self) -> list[int]:
        old, kind = self.random.choice(self.texts), self.random.random()
        start = old if kind < 0.5 else old[: self.random.randrange(len(old) + 1)] if kind < 0.9 else []
        suffix = [self.random.randrange(WORDS) for _ in range(self.random.randrange(16))]
        return (start + suffix)[: LONGEST - 12] or [0]

    def _new(self, ids: list[int], priority: int) -> Sequence:
        self.count += 1
        ends = sorted(self.random.sample(range(len(ids) + 1), min(2, len(ids))))
        chain = TokenChain(RootKey(model="m", weights=self.version), SHAPE.unit, ids)
        wanted = self.random.randint(1, 12)
        longest = self.random.choice((None, len(ids) + wanted))  # ends by a stop that nobody foresees, or by its length
        sequence = Sequence(f"s{self.count}", ids, chain, turn_ends=ends, priority=priority, longest=longest)
        self.alive[sequence.name] = sequence
        self.wanted[sequence.name], self.longest[sequence.name] = wanted, longest
        return sequence

    def submit(self) -> None:
        """A request with one answer or several."""
        if len(self.alive) >= 12:
            return
        ids, priority = self._prompt(), self.random.choice((0, 0, 0, 1, -1))
        sequence = self._new(ids, priority)
        for _ in range(self.random.choice((0, 0, 0, 1, 2))):
            sequence.followers.append(self._new(ids, priority))
            self.seen["follower"] += 1
        hits = self.tiers.counts.host_hits
        self.tiers.prefetch(sequence.chain, lambda: self.scheduler.add(sequence), post=None)
        self.seen["host hit"] += self.tiers.counts.host_hits - hits

    def abort(self) -> None:
        """Somebody leaves: while waiting, running, or with a step under way."""
        if not self.alive:
            return
        sequence = self.alive.pop(self.random.choice(sorted(self.alive)))
        busy = sequence.name in self._busy()
        self.seen["aborted under way" if busy else f"aborted {sequence.state}"] += 1
        self.scheduler.end(sequence)

    def preempt(self) -> None:
        """A running sequence starts again, as if its pages had been needed."""
        idle = [s for s in self.scheduler.running.values() if s.name not in self._busy()]
        if idle:
            self.scheduler.preempt(self.random.choice(idle))
            self.seen["preempted"] += 1

    def _busy(self) -> set[str]:
        return {row.sequence.name for flight in self.under_way for row in flight.plan.rows}

    # ---- steps

    def plan(self) -> None:
        """Another step, while at most one other is under way."""
        if len(self.under_way) >= 2:
            return
        if self.scheduler.crowded:  # somebody can make room once nothing is under way
            self.seen["crowded"] += bool(self.under_way)
            while self.under_way:
                self.settle()
        before = self.scheduler.preempted
        plan = self.scheduler.plan()
        self.seen["preempted for a page"] += self.scheduler.preempted - before
        for sequence, _ in self.scheduler.refused:
            self.alive.pop(sequence.name, None)
            self.seen["refused for ever"] += 1
        self.scheduler.refused.clear()
        if plan is None:
            self.seen["nothing to plan"] += 1
            return
        self._check_plan(plan)
        self.under_way.append(Flight(plan, self.version))

    def _check_plan(self, plan: Plan) -> None:
        limits = self.scheduler.limits
        rows = [row.sequence.name for row in plan.rows]
        if len(set(rows)) != len(rows) or len(self.scheduler.running) > limits.sequences:
            raise Mismatch(f"a sequence twice in a step, or too many: {rows}")
        if plan.tokens > limits.step_tokens and not limits.grid:
            raise Mismatch(f"{plan.tokens} tokens in a step of {limits.step_tokens}")
        for row in plan.rows:
            chunk, sequence = row.chunk, row.sequence
            known = len(sequence.ids)
            if row.draws != (chunk.end >= known) or chunk.end > known + row.awaits:
                raise Mismatch(f"{sequence}: tokens {chunk.start} to {chunk.end}, draws {row.draws}")
            longest = self.longest[sequence.name] or LONGEST + 12
            if row.awaits and (not self.scheduler.ahead or chunk.start != known or chunk.end >= longest):
                raise Mismatch(f"{sequence}: awaits token {chunk.start}")
            self.seen["awaited"] += row.awaits
            if limits.grid and chunk.end % limits.grid and chunk.end < known:
                raise Mismatch(f"{sequence}: a chunk ends at {chunk.end}, off the grid")
            self.seen["hit"] += bool(chunk.operations) and chunk.start > 0
            self.seen["mixed step"] += bool(plan.decode and plan.prefill)
        self.seen["overlapping steps"] += bool(self.under_way)

    def execute(self) -> None:
        """The device runs the oldest step that has not run; its tokens are drawn from what the pages hold."""
        flight = next((flight for flight in self.under_way if flight.drawn is None), None)
        if flight is None:
            return
        plan, version = flight.plan, flight.version
        drawn: dict[str, int] = {}
        for row in plan.rows:
            sequence, chunk = row.sequence, row.chunk
            stopped = self.alive.get(sequence.name) is not sequence
            if stopped and (sequence.name in self.broken or self.random.random() < 0.5):
                self.memory.spoil(chunk)  # it was stopped, and its row was not run to the end
                self.broken.add(sequence.name)
                continue
            ids = [*sequence.ids, self.last[sequence.name]] if row.awaits else sequence.ids
            if row.awaits and len(sequence.ids) == chunk.end and sequence.ids[-1] != ids[-1]:
                raise Mismatch(f"{sequence}: the host was told {sequence.ids[-1]}, the device drew {ids[-1]}")
            states = truth(ids[: chunk.end], version)
            self.memory.run(chunk, states)
            if row.draws:
                state = self.memory.memory[chunk.state[0]][0]
                drawn[sequence.name] = hash(state) % WORDS
                if self.alive.get(sequence.name) is sequence and drawn[sequence.name] != hash((0, states[-1])) % WORDS:
                    raise Mismatch(f"{sequence} says {drawn[sequence.name]}")
        for row in plan.rows:
            drawn.setdefault(row.sequence.name, 0)
        flight.drawn = self.last = drawn

    def settle(self) -> None:
        """The host reads what the oldest step has drawn."""
        if not self.under_way:
            return
        if self.under_way[0].drawn is None:
            self.execute()
        flight = self.under_way.popleft()
        self.seen["heard late"] += any(later.drawn is not None for later in self.under_way)
        self.scheduler.finish(flight.plan, flight.drawn)
        self._end_complete(flight.plan)

    def _end_complete(self, plan: Plan) -> None:
        for row in plan.rows:
            sequence = row.sequence
            if self.alive.get(sequence.name) is sequence and sequence.drawn >= self.wanted[sequence.name]:
                self.scheduler.end(sequence)
                del self.alive[sequence.name]
                self.seen["complete"] += 1
                self.seen["complete under way"] += sequence.name in self._busy()
                self._check_answer(sequence)
                self.answers.append((sequence, list(sequence.ids)))
                if len(self.texts) < 40:
                    self.texts.append(list(sequence.ids))
                else:
                    self.texts[self.random.randrange(1, 40)] = list(sequence.ids)

    def _check_answer(self, sequence: Sequence) -> None:
        if self.version:
            return  # weights may have changed in the middle; each draw was checked
        for at in range(sequence.prompt, len(sequence.ids)):
            if sequence.ids[at] != hash((0, truth(sequence.ids[:at], 0)[-1])) % WORDS:
                raise Mismatch(f"{sequence}: token {at} is not the model's")

    def fail(self) -> None:
        """The oldest step dies half-way; its sequences end, all others go on."""
        if not self.under_way:
            return
        plan = self.under_way.popleft().plan
        for row in plan.rows:
            self.memory.spoil(row.chunk)
            self.broken.add(row.sequence.name)
        for sequence in self.scheduler.fail(plan):
            self.alive.pop(sequence.name, None)
        for later in self.under_way:  # what they planned on it is lost as well; they are still run, to no effect
            for row in later.plan.rows:
                self.seen["planned on a failed step"] += row.sequence.state == "ended"
        self.seen["failed"] += 1

    # ---- running it

    def pin(self) -> None:
        """A prefix is kept, or let go."""
        if self.pins and (len(self.pins) > 1 or self.random.random() < 0.5):
            self.cache.unpin(self.pins.pop(self.random.randrange(len(self.pins))))
            return
        chain = TokenChain(RootKey(model="m", weights=self.version), SHAPE.unit, self._prompt())
        if (pin := self.cache.pin(chain)) is not None:
            self.pins.append(pin)
            self.seen["pin"] += 1

    def transfer(self) -> None:
        """A prefix comes from elsewhere: its pages are written at once, whatever the steps under way do; or it is there."""
        if self.arriving and self.random.random() < 0.7:
            name = self.random.choice(sorted(self.arriving))
            parts = self.arriving.pop(name)
            if self.random.random() < 0.2:
                self.cache.cancel_transfer(name)
                return
            for part in parts:
                self.cache.arrived(name, part)
            self.seen["transfer"] += 1
            return
        ids = self._prompt()
        length = len(ids) // SHAPE.unit * SHAPE.unit
        chain = TokenChain(RootKey(model="m", weights=self.version), SHAPE.unit, [*ids, 0])
        if not length or len(self.arriving) > 1 or self.cache.match(chain).resume >= length:
            return
        self.count += 1
        incoming = self.cache.receive(f"t{self.count}", chain, length)
        if incoming is None:
            return
        states = truth(ids, self.version)
        for token in range(incoming.start, incoming.end):
            page, cell = divmod(token - incoming.start, SHAPE.page_tokens)
            self.memory.memory[incoming.pages[page]][cell] = states[token + 1]
        for group, page in enumerate(incoming.state):
            self.memory.memory[page][0] = (group, states[incoming.end])
        self.arriving[incoming.name] = sorted(incoming.parts)

    def new_weights(self) -> None:
        """Other weights: what runs starts again, what waits is renamed, nothing old is a hit."""
        while self.under_way:
            self.settle()
        self.version += 1
        for sequence in list(self.scheduler.running.values()):
            self.scheduler.preempt(sequence)
        for pin in self.pins:
            self.cache.unpin(pin)
        self.pins.clear()
        self.cache.reset()
        for sequence in self.alive.values():
            root = RootKey(model="m", weights=self.version)
            sequence.chain = TokenChain(root, SHAPE.unit, sequence.ids)
        self.seen["new weights"] += 1

    def check(self) -> None:
        """All invariants."""
        self.cache.check_invariants()
        running = {name for name, s in self.alive.items() if s.state == "running"}
        if running != set(self.scheduler.running):
            raise Mismatch(f"{running} are running, the scheduler has {set(self.scheduler.running)}")
        if self.scheduler.waiting != sum(s.state == "waiting" for s in self.alive.values()):
            raise Mismatch("the queues do not hold those that wait")

    OPERATIONS = (
        ("plan", 34),
        ("execute", 20),
        ("settle", 34),
        ("submit", 16),
        ("abort", 4),
        ("preempt", 3),
        ("pin", 3),
        ("transfer", 6),
        ("fail", 1),
    )

    def step(self) -> None:
        """One random operation."""
        names, weights = zip(*self.OPERATIONS)
        getattr(self, self.random.choices(names, weights)[0])()

    def drain(self) -> None:
        """Everything that was asked is answered, in bounded time; only cached pages remain in use."""
        for pin in self.pins:
            self.cache.unpin(pin)
        for name in self.arriving:
            self.cache.cancel_transfer(name)
        self.pins.clear()
        self.arriving.clear()
        for _ in range(4000):
            if not self.alive and not self.under_way:
                break
            self.plan()
            self.settle()
        for sequence, ids in self.answers:
            if sequence.ids != ids:
                raise Mismatch(f"{sequence} went on behind its end")
        if self.alive or not self.scheduler.idle:
            raise Mismatch(f"{len(self.alive)} requests are never answered: {list(self.alive.values())[:4]}")
        self.check()
        pool = self.cache.store.pool
        if pool.free + pool.evictable != pool.pages:
            raise Mismatch(f"{pool.pages - pool.free - pool.evictable} pages leaked")
