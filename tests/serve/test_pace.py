"""Short prompts among long ones in virtual time: the scheduler is real, a pass takes what a formula says.

So a 99th percentile is the same on every machine. `bench engine` has the row with a real model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from perilune.errors import ConfigError
from perilune.serve.cache import CacheGeometry, HybridCache, RootKey, TokenChain
from perilune.serve.schedule import Limits, Scheduler, Sequence, ServiceClass, service_classes

ONE = (ServiceClass(name="all", up_to=2**62),)
SHAPE = CacheGeometry(
    unit=16, page_tokens=64, attention_layers=1, recurrent_layers=1, token_bytes=100, state_bytes=6400, heads=1
)
SHORT = 60


@dataclass(frozen=True)
class Machine:
    """A pass takes `fixed` and `each` a token, in milliseconds; one with a long prompt at least `deep` and those."""

    fixed: float
    each: float
    deep: float = 0.0
    step_tokens: int = 512
    context: int = 8192
    long: int = 3000


CPU = Machine(9.0, 0.1)
RECORDED = Machine(5.0, 0.007, deep=57.0, step_tokens=8192, context=131072, long=60_000)  # passes of short prompts are
GPU = Machine(28.0, 0.015, step_tokens=4096, context=131072, long=20_000)  # these are of the medium class there


def waits(machine: Machine, classes, *, busy: bool = True, count: int = 400) -> tuple[float, float]:
    """99th percentile of the short prompts' waits, and tokens of long ones in a millisecond."""
    limits = Limits(sequences=8, step_tokens=machine.step_tokens, chunk=machine.step_tokens, classes=classes)
    scheduler, rng = Scheduler(HybridCache(SHAPE, 4000), limits), random.Random(0)
    now, own, number = 0.0, machine.fixed + machine.each * SHORT, 0
    due, arrivals = 0.0, []
    for _ in range(count):
        due += rng.expovariate(1 / (8 * own))
        arrivals.append(due)
    arrivals.reverse()
    waiting: dict[str, tuple[Sequence, float]] = {}
    long: list[Sequence] = []
    found, ended = [], 0

    def add(tokens: int) -> Sequence:
        nonlocal number
        number += 1
        sequence = Sequence(f"s{number}", [number] * tokens, TokenChain(RootKey(model="m"), 16, [number] * tokens))
        scheduler.add(sequence)
        return sequence

    while arrivals or waiting:
        while arrivals and arrivals[-1] <= now:
            sequence = add(SHORT)
            waiting[sequence.name] = sequence, arrivals.pop()
        while busy and len(long) < 2:
            long.append(add(machine.long))
        if scheduler.idle:
            now = arrivals[-1]
            continue
        plan, drawn = scheduler.plan(), {}
        for stage, rows in enumerate(plan.stages):
            took = machine.fixed + machine.each * sum(row.chunk.end - row.chunk.start for row in rows)
            took += machine.deep * any(row.sequence.prompt == machine.long for row in rows)
            now += took * rng.uniform(0.95, 1.05)
            scheduler.took(plan, stage, took)
            for row in rows:
                if row.draws:
                    drawn[row.sequence.name] = 1
                    if row.sequence.name in waiting:
                        found.append(now - waiting[row.sequence.name][1])
        scheduler.finish(plan, drawn | {row.sequence.name: 1 for row in plan.decode})
        for name in [name for name in waiting if name in drawn]:
            scheduler.end(waiting.pop(name)[0])
        for sequence in [sequence for sequence in long if sequence.drawn]:
            long.remove(sequence)
            scheduler.end(sequence)
            ended += sequence.prompt
    return float(np.percentile(found, 99)), ended / now


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_short_prompts_wait_at_most_twice_as_long_as_on_an_idle_engine(machine):
    idle, _ = waits(machine, ONE, busy=False)
    alone, rate = waits(machine, ONE, count=100)
    among, slower = waits(machine, service_classes(machine.context))
    assert alone > 8 * idle and among <= 2.0 * idle, (
        f"{idle:.0f} ms idle, {among:.0f} with budgets, {alone:.0f} without"
    )
    assert rate / slower < 1.8, f"long prompts take {rate / slower:.2f} times as long"


def test_pieces_are_no_smaller_than_makes_them_shorter():
    """Where a piece costs ten short steps whatever it holds, long prompts go on all the same."""
    _, rate = waits(RECORDED, ONE, count=100)
    among, slower = waits(RECORDED, service_classes(RECORDED.context))
    assert among < 3 * RECORDED.deep and rate / slower < 5, (
        f"{among:.0f} ms, long prompts take {rate / slower:.1f} times as long"
    )


def test_patience_is_a_trade():
    (eager, less), (patient, more) = (waits(CPU, service_classes(8192, patience)) for patience in (1.0, 3.0))
    assert eager < 0.8 * patient and less < 0.8 * more


def test_classes_with_a_cap_take_turns():
    """A long prompt goes on while medium ones keep coming, and these while long ones do."""
    scheduler = Scheduler(HybridCache(SHAPE, 4000), Limits(step_tokens=512, chunk=512, classes=service_classes(8192)))
    sequences = [
        Sequence(f"s{n}", [n] * n, TokenChain(RootKey(model="m"), 16, [n] * n)) for n in (1500, 1600, 6000, 7000)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.pace.tokens = 256
    scheduler.pace.planned(short=True)
    for _ in range(6):
        scheduler.finish(scheduler.plan(), {})
    assert [sum(s.computed for s in pair) for pair in (sequences[:2], sequences[2:])] == [768, 768]


def test_patience_must_be_above_zero():
    with pytest.raises(ConfigError, match="patience=0.0 must be above 0"):
        service_classes(8192, 0.0)
