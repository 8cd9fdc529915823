"""Random operations on the cache against a symbolic model and a dictionary of whole prefixes; and faults that they must find."""

from __future__ import annotations

from collections import Counter

import pytest
from cache_faults import FAULTS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from symbolic_engine import Driver

from perilune.serve.cache import HybridCache

# Pools from roomy to hardly larger than one request; each policy; both orders of eviction.
SETTINGS = (
    ("turns+second-hit", 96, "work"),
    ("turns+second-hit", 40, "work"),
    ("dense", 60, "work"),
    ("tail", 200, "recency"),
    ("turns", 90, "work"),
    ("second-hit", 48, "recency"),
    ("interval:8+second-hit", 14, "work"),
    ("dense", 10, "work"),
)
MUST_HAPPEN = (
    "hit", "junction", "copy", "refused", "no page", "export", "recycled", "rejected", "pin", "transfer", "failed", "new weights",
    "lost state", "lost tokens", "aborted under way", "released under way",
)  # fmt: skip


def drive(seed: int, operations: int, setting: tuple[str, int, str]) -> Counter[str]:
    """One driver from empty to drained; returns what happened."""
    driver = Driver(seed, *setting)
    for number in range(operations):
        driver.step()
        if number % 100 == 50:
            driver.check()
        if number % 700 == 699:
            driver.new_weights()
    driver.drain()
    return driver.seen


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_operations_without_a_mismatch(count):
    operations, seen, each = count(full=1_000_000, reduced=32_000), Counter(), 4000
    for seed in range(operations // each):
        seen += drive(seed, each, SETTINGS[seed % len(SETTINGS)])
    assert not [name for name in MUST_HAPPEN if not seen[name]], f"this has proven nothing about some cases: {seen}"


class CacheMachine(RuleBasedStateMachine):
    """The driver's operations, with every choice drawn by Hypothesis, so that a failure shrinks."""

    @rule(choices=st.randoms(use_true_random=False), pages=st.sampled_from((11, 20, 48)))
    def restart(self, choices, pages):
        """Another cache; the first rule that runs without one makes it, too."""
        self.driver.drain()
        self.driver = Driver(0, choices.choice(SETTINGS)[0], pages)

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(0, pages=24)

    @rule(
        choices=st.randoms(use_true_random=False),
        operation=st.sampled_from(
            ("admit", "plan", "plan", "finish", "finish", "release", "pin", "fail", "transfer", "new_weights")
        ),
    )
    def operate(self, choices, operation):
        """Anything that an engine does."""
        self.driver.random = choices
        getattr(self.driver, operation)()

    @rule(choices=st.randoms(use_true_random=False))
    def probe(self, choices):
        """A look at what is cached."""
        self.driver.random = choices
        self.driver.probe()

    @invariant()
    def everything_agrees(self):
        """After each rule."""
        self.driver.check()

    def teardown(self):
        """No page leaks."""
        self.driver.drain()


CacheMachine.TestCase.settings = settings(stateful_step_count=60)
TestCacheMachine = pytest.mark.timeout(7200)(pytest.mark.soak(CacheMachine.TestCase))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    """Without the invariants, which would see some of them from inside: what a request reads must be enough."""
    monkeypatch.setattr(HybridCache, "check_invariants", lambda self, sample=None: None)
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(4):
            drive(seed, 3000, SETTINGS[seed])
