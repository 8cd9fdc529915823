"""How long a short prompt waits for its first token: on an idle engine, among long ones, and there without budgets.

Short prompts arrive at random moments, also in the middle of a step, and are seen at its end, as in a served engine. Among
long ones there are always two of these, the next one coming when one has its first token. Conditions take turns, so that a
neighbour on the machine slows all of them.

What the long ones pay stands in `extra`: `long_price` is how much longer they take than without budgets, the short ones coming
all the same.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perilune.bench.engine_driver import ONE_CLASS, Driver, pages_of, random_ids
from perilune.bench.harness import Row, commit, device_name, versions
from perilune.model import Transformer
from perilune.serve.schedule import Limits, Sequence, service_classes

SHORT = 60  # tokens
EACH = 25  # short prompts of a condition in a round


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the load.

    Attributes:
        long: tokens of a long prompt.
        step_tokens: of a step.
        context: decides the classes.
        rounds: of all conditions in turn.
        gap: mean time between two arrivals, in times of a short prompt's own step.
    """

    long: int
    step_tokens: int
    context: int
    rounds: int
    gap: float


CPU = Sizes(long=3000, step_tokens=512, context=8192, rounds=6, gap=8.0)
GPU = Sizes(long=60_000, step_tokens=8192, context=131072, rounds=2, gap=3.0)


class _Condition:
    """An engine with or without budgets and long prompts, and what its short ones have waited."""

    def __init__(self, model: Transformer, sizes: Sizes, *, budgets: bool, busy: bool) -> None:
        classes = service_classes(sizes.context) if budgets else ONE_CLASS
        limits = Limits(sequences=8, step_tokens=sizes.step_tokens, chunk=sizes.step_tokens, classes=classes)
        pages = pages_of(model, 8 * (sizes.long + 512), 16)
        self.driver = Driver(model, pages, limits, longest=sizes.long + 1)
        if budgets and busy:  # whose sizes of steps are left to chance; the others soon have had theirs
            self.driver.warm_up()
        self.model, self.sizes, self.busy = model, sizes, busy
        self.waits: list[float] = []
        self._long: list[Sequence] = []
        self._seeds = iter(range(1, 1 << 30))
        self._rng = random.Random(0)
        self._ended = 0  # tokens of long prompts that have been answered
        self._ran = self._seconds = 0.0

    @property
    def long_rate(self) -> float:
        """Tokens of long prompts in a second."""
        return self._ran / self._seconds

    def _computed(self) -> int:
        return self._ended + sum(sequence.computed for sequence in self._long)

    def _prompt(self, tokens: int) -> list[int]:
        return random_ids(self.model, tokens, next(self._seeds))

    def forget(self) -> None:
        """What was measured so far."""
        self.waits.clear()
        self._ran = self._seconds = 0.0

    def alone(self) -> float:
        """Seconds of one short prompt."""
        began = time.perf_counter()
        sequence = self.driver.add(self._prompt(SHORT))
        self.driver.until_first_token(sequence)
        self.driver.end(sequence)
        return time.perf_counter() - began

    def run(self, count: int, gap: float) -> None:
        """So many short prompts, at random times with this mean between them."""
        driver, due = self.driver, time.perf_counter()
        began, before = due, self._computed()
        arrivals = []
        for _ in range(count):
            due += self._rng.expovariate(1 / gap)
            arrivals.append((due, self._prompt(SHORT)))
        waiting: dict[str, tuple[Sequence, float]] = {}
        while arrivals or waiting:
            while arrivals and arrivals[0][0] <= time.perf_counter():
                due, ids = arrivals.pop(0)
                sequence = driver.add(ids)
                waiting[sequence.name] = (sequence, due)
            while self.busy and len(self._long) < 2:
                self._long.append(driver.add(self._prompt(self.sizes.long)))
            if driver.scheduler.idle:
                time.sleep(max(0.0, arrivals[0][0] - time.perf_counter()))
                continue
            driver.step()
            for name in [name for name in waiting if name in driver.spoke]:
                sequence, due = waiting.pop(name)
                self.waits.append(1e3 * (driver.spoke[name] - due))
                driver.end(sequence)
            for sequence in [sequence for sequence in self._long if sequence.drawn]:
                self._long.remove(sequence)
                self._ended += sequence.computed
                driver.end(sequence)
        self._seconds += time.perf_counter() - began
        self._ran += self._computed() - before


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The row `engine_short_p99`: 99th percentile of the wait among long prompts, beside that on an idle engine.

    Attributes:
        model: served.
        sizes: of the load.
        goal: ratio that is aimed at.
    """

    model: Transformer
    sizes: Sizes
    goal: float
    name: str = "engine_short_p99"

    @property
    def shape(self) -> str:
        """The load."""
        return f"{SHORT} tokens at random moments, always two prompts of {self.sizes.long} at work"

    def measure(self, device: str, samples: int) -> Row:
        """Run all conditions in turns."""
        conditions = {
            "budgets": _Condition(self.model, self.sizes, budgets=True, busy=True),
            "idle": _Condition(self.model, self.sizes, budgets=True, busy=False),
            "one_queue": _Condition(self.model, self.sizes, budgets=False, busy=True),
        }
        idle = conditions["idle"]
        gap = self.sizes.gap * statistics.median(idle.alone() for _ in range(9))
        conditions["budgets"].run(EACH, gap)  # the engine learns its pace
        conditions["one_queue"].run(EACH // 5, gap)
        for condition in conditions.values():
            condition.forget()
        for _ in range(self.sizes.rounds):
            for label, condition in conditions.items():
                condition.run(EACH if label != "one_queue" else EACH // 5, gap)
        ours, theirs = conditions["budgets"].waits, idle.waits
        price = conditions["one_queue"].long_rate / conditions["budgets"].long_rate
        p99, idle_p99 = (float(np.percentile(waits, 99)) for waits in (ours, theirs))
        return Row(
            name=self.name, shape=self.shape, ours_ms=p99, peer="the same, no long prompts", peer_ms=idle_p99,
            ratio=idle_p99 / p99, bound_ms=None, device=device_name(device), versions=versions(), commit=commit(),
            ours_spread_ms=(min(ours), max(ours)), peer_spread_ms=(min(theirs), max(theirs)), samples=len(ours),
            extra=dict(_percentiles(conditions)) | {"target_ratio": self.goal, "long_price": price},
        )  # fmt: skip


def _percentiles(conditions: dict[str, _Condition]) -> Iterator[tuple[str, float]]:
    for label, condition in conditions.items():
        for percent in (50, 99):
            yield f"{label}_p{percent}_ms", float(np.percentile(condition.waits, percent))
