"""A step between its launch and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perilune.serve.sampling import Draw, Drawn
from perilune.serve.schedule import Plan, Row
from perilune.serve.staging import Stopwatch


class Stage(NamedTuple):
    """A stage that was launched: its rows that draw, their draw (None without any), and how long the device takes."""

    rows: Sequence[Row]
    draw: Draw | None
    watch: Stopwatch

    def read(self) -> tuple[dict[str, Drawn], float]:
        """At its end: what its rows have drawn, by the names of sequences, and how many seconds it took."""
        drawn = [] if self.draw is None else self.draw.read()
        return {row.sequence.name: one for row, one in zip(self.rows, drawn)}, self.watch.seconds()


class Flight:
    """A step that was launched.

    Attributes:
        plan: the step.
        stages: those that were launched so far.
        error: why no further one will be; it is raised when the step is settled, behind those before it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stages: list[Stage] = []
        self.error: Exception | None = None
