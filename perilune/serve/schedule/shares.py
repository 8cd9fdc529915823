"""How the tokens of a step are shared among prompts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from perilune.serve.schedule.limits import Limits
from perilune.serve.schedule.pace import LEAST, Pace
from perilune.serve.schedule.sequence import RUNNING, Sequence


class Shares:
    """Shares of one step.

    Args:
        limits: of the step, and the classes.
        unit: tokens between two points at which a checkpoint can be.
        prompts: running sequences with more than one token to compute, by class, the most important first; those that are
            admitted are added.
        admit: lets the next one of a class run; None: nobody waits there, or must wait on.
        planned: names of sequences that get tokens in this step, which nobody may take the pages of; added to.

    Attributes:
        given: tokens of this step by the name of their sequence.
    """

    def __init__(
        self, limits: Limits, unit: int, prompts: list[list[Sequence]], admit: Callable[[int], Sequence | None],
        planned: set[str],
    ) -> None:  # fmt: skip
        self._limits, self._unit, self._prompts, self._admit, self._planned = limits, unit, prompts, admit, planned
        self._least = min(unit, LEAST)
        self._sparing: list[bool] = []  # of each class: its own share is a piece in every step, so crumbs can wait
        self.given: dict[str, int] = {}

    def hand_out(self, budget: int, at_work: Many[bool], pace: Pace) -> None:
        """Each class's own share, then what is left, the most important class first; classes with a cap come last, and wait
        for the next step while others keep coming, but not for ever.

        Args:
            budget: tokens.
            at_work: which classes have something to compute.
            pace: of the classes with a cap.
        """
        classes = self._limits.classes
        self._sparing = [
            int(shares.cap * budget) >= self._least
            and (not shares.tokens or int(shares.tokens * budget) >= self._least)
            for shares in classes
        ]
        own = [int(shares.tokens * budget) if work else 0 for shares, work in zip(classes, at_work)]
        capped = [kind for kind, shares in enumerate(classes) if shares.cap < 1.0]
        others = [kind for kind in range(len(classes)) if kind not in capped]
        wait = pace.planned(short=any(at_work[kind] for kind in others))
        left = budget if wait else budget - sum(own[kind] for kind in capped)
        left -= sum(self._serve(kind, own[kind]) for kind in others)
        for kind in others:
            left -= self._serve(kind, left)
        if wait and self.given:
            return
        left = int(min(budget - sum(self.given.values()), pace.most))
        for kind in capped if pace.turns % 2 else reversed(capped):  # a piece may be all of one class
            cap = int(classes[kind].cap * budget) if sum(at_work) > 1 else budget
            left -= self._serve(kind, min(left, cap))

    def _serve(self, kind: int, budget: int) -> int:
        """Give up to `budget` tokens to a class: to its prompts that run, then to those it can admit; returns how many."""
        spent = 0
        for sequence in self._prompts[kind]:
            if spent >= budget:
                return spent
            if sequence.state == RUNNING:  # and has not made room for a more important one
                spent += self._give(sequence, budget - spent)
        while spent < budget and (sequence := self._admit(kind)) is not None:
            self._prompts[kind].append(sequence)
            count = self._give(sequence, budget - spent)
            if not count:  # what is left is a crumb
                break
            spent += count
        return spent

    def _give(self, sequence: Sequence, room: int) -> int:
        """Add to a sequence's tokens of this step; returns how many."""
        had, grid = self.given.get(sequence.name, 0), self._limits.grid
        if grid:  # all of its block at once, even beyond the room: half a block would be another arithmetic
            count = 0 if had else min(sequence.left, grid - sequence.scheduled % grid)
        else:
            count = min(sequence.left - had, self._limits.chunk - had, room)
            if count < sequence.left - had:
                count -= self._too_far(sequence, had, count)
        if count > 0:
            self.given[sequence.name] = had + count
            self._planned.add(sequence.name)
        return max(count, 0)

    def _too_far(self, sequence: Sequence, had: int, count: int) -> int:
        """How many of `count` tokens behind `had` others are not worth beginning, as the rest of their piece is not there.

        A piece ends where a checkpoint can be, or else on the grid of the recurrence's chunks. Less than that is a crumb, behind
        which everything would lie off that grid, where no recorded pass exports states: it is left for a later step, unless
        nothing else is computed in this one, or the sequence's class may never get more.
        """
        whole, end = had + count, sequence.scheduled + had + count
        for grid in (self._unit, self._least):
            if end % grid < whole:
                return end % grid
        return count if self.given and self._sparing[sequence.kind] else 0
