"""Continuous batching over the prefix cache: decode and chunks of prompts in one step, within budgets by class.

Life of a sequence: `add` puts it into the queue of its class; `plan` admits it when the cache has all its pages and plans its
chunks; `finish` hands over what was drawn; `end` lets its pages go. `abort` may come at any point, also while a step that has
a row of it is under way: the cache then frees its pages when that step has finished. If a decoding sequence finds no page, the
one that came last starts again later: what it computed is in the cache, so that little is computed twice.

A step's work here is proportional to its rows and its new tokens, not to the lengths of the sequences. Several steps may be
under way: a prompt's next chunk can be planned before the last one has finished, and so can, with `ahead`, the token behind
one that is being drawn.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from perilune.errors import CapacityError
from perilune.serve.cache import Admission, HybridCache
from perilune.serve.schedule.classes import class_of, patience_of
from perilune.serve.schedule.limits import Limits
from perilune.serve.schedule.pace import Pace
from perilune.serve.schedule.plan import Plan, Row
from perilune.serve.schedule.queues import Queues, importance
from perilune.serve.schedule.sequence import ENDED, RUNNING, WAITING, Sequence
from perilune.serve.schedule.shares import Shares


class Scheduler:
    """Plans steps.

    Args:
        cache: gives and takes pages; nobody else admits requests to it.
        limits: see `Limits`.
        ahead: whether a row may be planned for a token that a step under way is drawing.

    Attributes:
        running: admitted sequences, in the order of admission.
        queues: those that wait.
        preempted: times that a sequence had to start again.
        steps: planned so far.
        refused: sequences that the pool could never hold, with the reason; whoever calls `plan` takes them out.
        pace: of the classes with a cap, see `pace`; whoever runs the steps tells it how long they took.
        crowded: the last plan lacked a page or a slot that a sequence of a step under way could give up.
    """

    def __init__(self, cache: HybridCache, limits: Limits, *, ahead: bool = False) -> None:
        self.cache, self.limits, self.ahead = cache, limits, ahead
        self.crowded = False
        self.running: dict[str, Sequence] = {}
        self.refused: list[tuple[Sequence, CapacityError]] = []
        self.preempted = self.steps = 0
        self.queues = Queues(len(limits.classes))
        self.pace = Pace(patience_of(limits.classes))
        self._slots = [0] * len(limits.classes)
        self._arrivals = 0
        self._under_way: deque[Plan] = deque()
        self._planned: set[str] = set()  # sequences that get tokens in the step that is being planned

    # ---- sequences come and go

    @property
    def waiting(self) -> int:
        """Sequences in the queues."""
        return len(self.queues)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or is under way."""
        return not (self.running or self.waiting or self._under_way or self.refused)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; its followers are queued once its prompt is computed."""
        self._arrivals += 1
        sequence.order = self._arrivals
        sequence.importance = sequence.priority, sequence.order
        sequence.kind = class_of(sequence.prompt, self.limits.classes)
        self.queues.push(sequence)

    def end(self, sequence: Sequence) -> None:
        """A sequence is done, or aborted at whatever point; no more rows of it are planned."""
        if sequence.state == RUNNING:
            self._stop(sequence)
        elif sequence.state == WAITING:
            self.queues.leave(sequence)
        sequence.state = ENDED
        self._free_followers(sequence)

    def _stop(self, sequence: Sequence) -> None:
        del self.running[sequence.name]
        self._slots[sequence.kind] -= 1
        self.cache.release(sequence.name)

    def _free_followers(self, sequence: Sequence) -> None:
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            if follower.state != ENDED:
                self.add(follower)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it starts again from what of it is in the cache, when there is room."""
        assert not sequence.pending, f"{sequence} is in a step under way"
        self._stop(sequence)
        self.preempted += 1
        sequence.preemptions += 1
        sequence.scheduled = sequence.computed = 0
        sequence.chain.extend(sequence.ids[len(sequence.chain) :])
        self.queues.push(sequence)

    # ---- planning

    def plan(self) -> Plan | None:
        """The next step; None if nothing can be computed now."""
        step = self.cache.begin_step()
        self._planned.clear()
        self.crowded = False
        self._make_way()
        decode = self._plan_decoding(step)
        prefill = []
        if len(decode) < len(self.running) or self.waiting:
            prefill = self._plan_prompts(step, self.limits.step_tokens - len(decode))
        if not decode and not prefill:
            self._drop_empty(step)
            self._unblock()
            return None
        late = [row for row in prefill if self.limits.classes[row.sequence.kind].cap < 1.0]
        if late:
            prefill = [row for row in prefill if row not in late] + late
        plan = Plan(step, tuple(decode), tuple(prefill), len(late))
        self._under_way.append(plan)
        self.steps += 1
        return plan

    def _make_way(self) -> None:
        """Where a more important sequence has no slot or found no pages, a lesser one goes before it gets another row."""
        for kind in range(len(self.limits.classes)):
            head = self.queues.head(kind)
            if head is not None and (self._free_slots(kind) < 1 or self.queues.lacks_pages(head)):
                victim = self._outranked(head)
                if victim is not None:
                    self.preempt(victim)

    def _unblock(self) -> None:
        """Nothing can go on although nothing is under way: the least important sequence makes room, or is given up."""
        if self._under_way or not self.running or self.cache.lent:
            return
        worst = max(self.running.values(), key=importance)
        if len(self.running) > 1:
            self.preempt(worst)
            return
        pages = self.cache.store.pool.pages
        self.end(worst)
        self.refused.append((worst, CapacityError(
            f"{len(worst.ids)} tokens fill the cache of {pages} pages, and the next one finds none; ask for fewer tokens or "
            "give the cache more memory"
        )))  # fmt: skip

    def _drop_empty(self, step: int) -> None:
        # Steps finish in order: one without rows waits for those before it.
        if self._under_way:
            self._under_way.append(Plan(step, (), ()))
        else:
            self.cache.finish_step(step)

    def _plan_decoding(self, step: int) -> list[Row]:
        """One token for each sequence that has only its last one left, known or being drawn."""
        ahead, ready = self.ahead, []
        for s in self.running.values():
            tokens = len(s.ids) + s.pending
            if s.scheduled == tokens - 1 >= s.prompt and not (s.pending and (not ahead or tokens >= s.longest)):
                ready.append(s)
        ready.sort(key=importance)
        rows: list[Row] = []
        for sequence in ready[: self.limits.step_tokens]:
            if sequence.state != RUNNING:  # preempted for one before it
                continue
            row = self._extend(step, sequence, 1)
            while row is None:
                victim = self._victim(sequence)
                if victim is None:
                    break
                self.preempt(victim)
                row = self._extend(step, sequence, 1)
            if row is not None:
                rows.append(row)
        return rows

    def _movable(self) -> list[Sequence]:
        """Running sequences that no step, neither one under way nor this one, has a row of."""
        busy = self._planned | self._busy()
        return [sequence for sequence in self.running.values() if sequence.name not in busy]

    def _busy(self) -> set[str]:
        """Sequences that steps under way have rows of."""
        return {row.sequence.name for plan in self._under_way for row in plan.rows}

    def _victim(self, wanting: Sequence) -> Sequence | None:
        """The least important sequence that can make room for `wanting`, and is not more important."""
        others = [sequence for sequence in self._movable() if sequence is not wanting]
        worst = max(others, key=importance, default=None)
        if worst is not None and importance(worst) > importance(wanting):
            return worst
        self._note_crowded(lambda other: importance(other) > importance(wanting))
        return None

    def _note_crowded(self, outranked: Callable[[Sequence], bool]) -> None:
        """Nobody could make room; perhaps somebody can when the steps under way are settled."""
        busy = self._busy()
        self.crowded = self.crowded or any(name in busy and outranked(other) for name, other in self.running.items())

    def _extend(self, step: int, sequence: Sequence, tokens: int) -> Row | None:
        chunk = self.cache.extend(step, sequence.name, tokens)
        if chunk is None:
            return None
        end, known = chunk.end, len(sequence.ids)
        sequence.scheduled = end
        self._planned.add(sequence.name)
        if end < known:
            return Row(sequence, chunk, draws=False)
        sequence.pending += 1
        return Row(sequence, chunk, True, end > known)

    def _plan_prompts(self, step: int, budget: int) -> list[Row]:
        """Chunks of prompts, of up to `budget` tokens."""
        if budget < 1:
            return []
        kinds = range(len(self.limits.classes))
        prompts: list[list[Sequence]] = [[] for _ in kinds]
        for sequence in self.running.values():
            if sequence.left > (sequence.scheduled >= sequence.prompt):  # its last token alone is decoding
                prompts[sequence.kind].append(sequence)
        for kind in prompts:
            kind.sort(key=importance)
        shares = Shares(self.limits, self.cache.geometry.unit, prompts, self._admit, self._planned)
        at_work = [bool(prompts[kind] or self.queues.count(kind)) for kind in kinds]
        shares.hand_out(budget, at_work, self.pace)
        rows = []
        for sequence in itertools.chain(*prompts):
            count = shares.given.pop(sequence.name, 0)
            if count and (row := self._extend(step, sequence, count)) is not None:
                rows.append(row)
        return rows

    # ---- admission

    def _free_slots(self, kind: int) -> int:
        """Slots that a class may take: what others have reserved and do not use is not for it."""
        total, classes = self.limits.sequences, self.limits.classes
        others = sum(
            max(self._slots[k], int(shares.slots * total)) for k, shares in enumerate(classes) if k != kind
        )  # fmt: skip
        return min(total - sum(self._slots), total - others - self._slots[kind])

    def _admit(self, kind: int) -> Sequence | None:
        """Admit the first waiting sequence of a class; None if none waits, or it must wait on."""
        sequence = self.queues.head(kind)
        if sequence is None or self.queues.must_wait(sequence):
            return None
        while (free := self._free_slots(kind)) < 1 or (admission := self._ask(sequence)) is None:
            if sequence.state != WAITING:  # the pool can never hold it
                return self._admit(kind)
            victim = self._outranked(sequence)
            if victim is None:
                if free > 0:  # it lacks pages; that others keep the slots of their class is not to be held against them
                    self.queues.found_no_pages(sequence)
                return None
            self.preempt(victim)
        self.queues.pop(kind)
        sequence.state = RUNNING
        sequence.scheduled = sequence.computed = admission.resume
        if sequence.resume is None:
            sequence.resume, sequence.known = admission.resume, admission.known
        self.running[sequence.name] = sequence
        self._slots[kind] += 1
        return sequence

    def _ask(self, sequence: Sequence) -> Admission | None:
        if sequence.preemptions and self.running and not self._has_headroom(sequence):
            return None
        try:
            return self.cache.admit(sequence.name, sequence.chain, sequence.turn_ends)
        except CapacityError as error:
            self.end(sequence)
            self.refused.append((sequence, error))
            return None

    def _has_headroom(self, sequence: Sequence) -> bool:
        """Whether a page for each running sequence is left when a preempted one comes back; else it would be back at once."""
        shape, pool = self.cache.geometry, self.cache.store.pool
        return pool.available >= shape.pages_for(len(sequence.ids)) + 2 * shape.groups + len(self.running)

    def _outranked(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of a worse priority number that can start again for a waiting one."""
        others = [other for other in self._movable() if other.priority > sequence.priority]
        if not others:
            self._note_crowded(lambda other: other.priority > sequence.priority)
        return max(others, key=importance, default=None)

    # ---- results

    def finish(self, plan: Plan, drawn: dict[str, int]) -> None:
        """The oldest step under way has finished.

        Args:
            plan: the step.
            drawn: the token of each row that draws, by the name of its sequence; those of ended sequences are ignored.
        """
        self._take(plan)
        for row in plan.rows:
            sequence = row.sequence
            if sequence.state != RUNNING:
                continue
            sequence.computed = row.chunk.end
            if row.draws:
                sequence.pending -= 1
                sequence.append(drawn[sequence.name])
                if sequence.followers:
                    self._free_followers(sequence)
        self.cache.finish_step(plan.step)
        self._finish_empty()

    def took(self, plan: Plan, stage: int, seconds: float) -> None:
        """A stage of a plan ran for so long: what `pace` learns from."""
        rows = plan.stages[stage]
        late = plan.late if stage == len(plan.stages) - 1 else 0
        if rows and late == len(rows):
            self.pace.long_took(sum(row.chunk.end - row.chunk.start for row in rows), seconds)
        elif rows and not late:
            self.pace.short_took(seconds)

    def fail(self, plan: Plan) -> list[Sequence]:
        """The oldest step under way failed: nothing of it counts. Returns its sequences, all ended now."""
        self._take(plan)
        self.cache.fail_step(plan.step)
        self._finish_empty()
        failed = [row.sequence for row in plan.rows if row.sequence.state == RUNNING]
        for sequence in failed:
            self.end(sequence)
        return failed

    def _take(self, plan: Plan) -> None:
        assert self._under_way and self._under_way[0] is plan, f"step {plan.step} is not the oldest one under way"
        self._under_way.popleft()

    def _finish_empty(self) -> None:
        while self._under_way and not self._under_way[0].rows:
            self.cache.finish_step(self._under_way.popleft().step)
