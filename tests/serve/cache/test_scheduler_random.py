"""Random requests, stops, faults and pressure on the scheduler against a symbolic model; and faults that it must find."""

from __future__ import annotations

from collections import Counter

import pytest
from cache_faults import FAULTS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from symbolic_server import SymbolicPages, SymbolicServer

from perilune.serve.cache import HybridCache
from perilune.serve.cache.steps import StepLedger
from perilune.serve.schedule import Scheduler, Sequence
from perilune.serve.schedule.sequence import ENDED
from perilune.serve.schedule.shares import Shares
from perilune.serve.tiers import Tiers

# Pools from roomy to hardly larger than one request; several policies; with and without a grid; with and without rows for
# tokens that are being drawn.
SETTINGS = (
    ("turns+second-hit", 90, "work", 0, True),
    ("turns+second-hit", 30, "work", 0, False),
    ("dense", 60, "work", 4, True),
    ("tail", 40, "recency", 0, False),
    ("interval:8+second-hit", 24, "work", 0, True),
    ("turns", 26, "work", 8, False),
    ("turns+second-hit", 30, "work", 0, True),
    ("turns+second-hit", 90, "work", 0, False),
)
AHEAD = [setting for setting in SETTINGS if setting[-1]]
MUST_HAPPEN = (
    "hit", "complete", "follower", "preempted", "preempted for a page", "mixed step", "overlapping steps", "failed", "pin",
    "transfer", "written back", "host hit", "new weights", "aborted under way", "aborted waiting", "aborted running", "nothing to plan",
    "awaited", "heard late", "complete under way", "crowded", "planned on a failed step",
)  # fmt: skip


def drive(seed: int, operations: int, setting: tuple[str, int, str, int, bool]) -> Counter[str]:
    """One server from empty to drained; returns what happened."""
    server = SymbolicServer(seed, *setting)
    for number in range(operations):
        server.step()
        if number % 100 == 50:
            server.check()
        if number % 900 == 899:
            server.new_weights()
    server.drain()
    server.seen["written back"] = server.tiers.counts.written_back
    return server.seen


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_operations_give_the_models_own_answers(count):
    operations, seen, each = count(full=1_000_000, reduced=16_000), Counter(), 2000
    for seed in range(operations // each):
        seen += drive(seed, each, SETTINGS[seed % len(SETTINGS)])
    assert not [name for name in MUST_HAPPEN if not seen[name]], f"this has proven nothing about some cases: {seen}"


class ServerMachine(RuleBasedStateMachine):
    """The server's operations, with every choice drawn by Hypothesis, so that a failure shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.server = SymbolicServer(0, pages=30, ahead=True)

    @rule(
        choices=st.randoms(use_true_random=False),
        operation=st.sampled_from(
            (
                "submit",
                "submit",
                "plan",
                "plan",
                "execute",
                "settle",
                "settle",
                "abort",
                "preempt",
                "pin",
                "fail",
                "transfer",
                "new_weights",
            )
        ),
    )
    def operate(self, choices, operation):
        """Anything that happens to an engine."""
        self.server.random = choices
        getattr(self.server, operation)()

    @invariant()
    def everything_agrees(self):
        """After each rule."""
        self.server.check()

    def teardown(self):
        """All are answered, no page leaks."""
        self.server.drain()


ServerMachine.TestCase.settings = settings(stateful_step_count=60)
TestServerMachine = pytest.mark.timeout(7200)(pytest.mark.soak(ServerMachine.TestCase))


# ---- faults of a scheduler; each must be found


def leak_on_abort(patch):
    def stop(self, sequence):
        del self.running[sequence.name]
        self._slots[sequence.kind] -= 1

    patch.setattr(Scheduler, "_stop", stop)


def forget_followers(patch):
    patch.setattr(Scheduler, "_free_followers", lambda self, sequence: None)


def name_other_tokens(patch):
    """Prefixes of drawn tokens under the name of others."""

    def append(self, token_id):
        self.ids.append(token_id)
        self.chain.extend([0] * (len(self.ids) - len(self.chain)))

    patch.setattr(Sequence, "append", append)


def skip_what_is_known(patch):
    real = Scheduler._admit

    def admit(self, kind):
        sequence = real(self, kind)
        if sequence is not None:
            lease = self.cache._leases[sequence.name]
            sequence.scheduled = sequence.computed = lease.scheduled = max(lease.scheduled, sequence.known)
        return sequence

    patch.setattr(Scheduler, "_admit", admit)


def preempt_those_under_way(patch):
    patch.setattr(Scheduler, "_movable", lambda self: list(self.running.values()))


def ignore_the_budget(patch):
    real = Shares._serve
    patch.setattr(Shares, "_serve", lambda self, kind, budget: real(self, kind, 2 * budget))


def draw_early(patch):
    real = Scheduler._extend

    def extend(self, step, sequence, tokens):
        row = real(self, step, sequence, tokens)
        return row and row._replace(draws=row.chunk.end >= sequence.prompt - 1)

    patch.setattr(Scheduler, "_extend", extend)


def restore_other_pages(patch):
    """As if all pages of a prefix were missing in the pool, whatever is there already."""
    real = SymbolicPages.write_bytes

    def write(self, pages, contents):
        real(self, pages, list(contents[:1]) * len(pages))

    patch.setattr(SymbolicPages, "write_bytes", write)


def write_back_late(patch):
    """When the pages belong to somebody else already."""
    real, waiting = Tiers._write_back, []

    def later(self, node):
        if waiting:
            waiting.pop()()
        checkpoint = node.checkpoint

        def write():
            if node.checkpoint is None:
                node.checkpoint = checkpoint
                real(self, node)
                node.checkpoint = None

        waiting.append(write)

    patch.setattr(Tiers, "_write_back", later)


def bring_back_half(patch):
    """The tokens of a prefix without its states."""
    real = SymbolicPages.write_bytes
    patch.setattr(
        SymbolicPages,
        "write_bytes",
        lambda self, pages, contents: real(self, pages[:-1], list(contents)[: len(pages) - 1]),
    )


# ---- faults of planning ahead, with a row of a sequence under way when it ends


def publish_what_is_under_way(patch):
    """With each step that ends, what the one behind it will write."""
    real = StepLedger.settle

    def settle(self, number, kept, *, failed):
        real(self, number, kept, failed=failed)
        for step in self.under_way:
            for record in step.records:
                if record.lease.publishing and not record.lease.released:
                    self.publisher.commit(record, record.end)
                    record.exports, record.found = (), ()

    patch.setattr(StepLedger, "settle", settle)


def free_behind_the_oldest_step(patch):
    """As if no step could be under way but one."""

    def release(self, lease):
        lease.released = True
        if self.under_way:
            self.under_way[0].closing.append(lease)
        else:
            self.close(lease)

    patch.setattr(StepLedger, "release", release)


def say_the_extra_token(patch):
    real = Scheduler.finish

    def finish(self, plan, drawn):
        for row in plan.rows:
            if row.sequence.state == ENDED and row.draws:
                row.sequence.append(drawn[row.sequence.name])
        real(self, plan, drawn)

    patch.setattr(Scheduler, "finish", finish)


def publish_the_extra_token(patch):
    """What a row computes whose sequence has ended meanwhile."""

    def release(self, lease):
        for step in self.under_way:
            if step.number == lease.last_step:
                step.closing.append(lease)
                return
        self.close(lease)

    patch.setattr(StepLedger, "release", release)


def plan_beyond_the_length(patch):
    real = Scheduler.plan

    def plan(self):
        for sequence in self.running.values():
            sequence.longest += 10
        return real(self)

    patch.setattr(Scheduler, "plan", plan)


def await_twice(patch):
    """A row for a token whose predecessor is not known either."""
    real = Scheduler._extend

    def extend(self, step, sequence, tokens):
        row = real(self, step, sequence, tokens)
        if row and row.awaits:
            sequence.pending = 1
        return row

    patch.setattr(Scheduler, "_extend", extend)


OF_THE_CACHE = (
    "resume at token depth", "no copy-on-write", "no zeroing", "publish at schedule", "free before fence",
    "first node's page", "restore in place", "siblings survive", "failed steps published", "checkpoint overwritten",
)  # fmt: skip
OF_THE_SCHEDULER = {
    "pages leak on abort": leak_on_abort,
    "followers forgotten": forget_followers,
    "drawn tokens misnamed": name_other_tokens,
    "known tokens skipped": skip_what_is_known,
    "busy ones preempted": preempt_those_under_way,
    "budget ignored": ignore_the_budget,
    "drawn too early": draw_early,
    "other pages brought back": restore_other_pages,
    "written back too late": write_back_late,
    "half a prefix brought back": bring_back_half,
}
OF_PLANNING_AHEAD = {
    "published while under way": publish_what_is_under_way,
    "freed behind the oldest step": free_behind_the_oldest_step,
    "extra token said": say_the_extra_token,
    "extra token published": publish_the_extra_token,
    "planned beyond the length": plan_beyond_the_length,
    "awaited twice": await_twice,
    "publish at schedule": FAULTS["publish at schedule"],
    "free before fence": FAULTS["free before fence"],
}
ALL = {name: FAULTS[name] for name in OF_THE_CACHE} | OF_THE_SCHEDULER


def is_found(monkeypatch, fault, settings) -> None:
    """Without the invariants, which would see some of them from inside: what a request reads and says must be enough."""
    monkeypatch.setattr(HybridCache, "check_invariants", lambda self, sample=None: None)
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(12):
            drive(seed, 2500, settings[seed % len(settings)])


@pytest.mark.parametrize("name", ALL)
def test_a_planted_fault_is_found(name, monkeypatch):
    is_found(monkeypatch, ALL[name], SETTINGS)


@pytest.mark.parametrize("name", OF_PLANNING_AHEAD)
def test_a_fault_of_planning_ahead_is_found(name, monkeypatch):
    is_found(monkeypatch, OF_PLANNING_AHEAD[name], AHEAD)
