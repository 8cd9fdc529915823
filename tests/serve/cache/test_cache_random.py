"""Random operations on the cache against a symbolic model and a dictionary of whole prefixes; and faults that they must find."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from symbolic_engine import Driver

from perilune.serve.cache import CopyPage, HybridCache, RootKey, ZeroState, prefix_cache
from perilune.serve.cache import hashing as hashing_module
from perilune.serve.cache.receive import Transfers
from perilune.serve.cache.steps import StepLedger
from perilune.serve.cache.store import CacheStore
from perilune.serve.cache.trie import PrefixTrie, ancestors

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


# ---- faults that other engines had; each must be found


def resume_at_token_depth(patch):
    real = PrefixTrie.match

    def match(self, digests, tokens):
        found = real(self, digests, tokens)
        node = self.nodes[digests[found.known // self.unit - 1]] if found.known else None
        return replace(found, resume=found.known, node=node)

    patch.setattr(PrefixTrie, "match", match)


def drop_operations(patch, kind):
    real = prefix_cache.start_operations
    patch.setattr(
        prefix_cache, "start_operations", lambda *args: tuple(op for op in real(*args) if not isinstance(op, kind))
    )


def publish_at_schedule(patch):
    real = StepLedger.extend

    def extend(self, step, lease, tokens):
        chunk = real(self, step, lease, tokens)
        if chunk is not None and lease.publishing:
            record = self.under_way[-1].records[-1]
            self.publisher.commit(record, record.end)
            record.exports, record.found = (), ()
        return chunk

    patch.setattr(StepLedger, "extend", extend)


def free_before_fence(patch):
    def release(self, lease):
        lease.released = True
        self.close(lease)
        lease.sources = ()

    patch.setattr(StepLedger, "release", release)


def bind_first_node(patch):
    real = prefix_cache.hit_pages

    def first(node, geometry):
        table = {(earlier.depth - 1) // geometry.page_tokens: earlier.page for earlier in ancestors(node)}
        hit = real(node, geometry)
        return replace(hit, table=[table[index] for index in range(len(table))])

    patch.setattr(prefix_cache, "hit_pages", first)


def restore_in_place(patch):
    real = HybridCache.admit

    def admit(self, request, chain, turn_ends=()):
        admission = real(self, request, chain, turn_ends)
        lease = self._leases.get(request)
        if lease is not None and lease.sources:
            lease.state, lease.sources = lease.sources, lease.state
            lease.operations = tuple(op for op in lease.operations if isinstance(op, CopyPage))
        return admission

    patch.setattr(HybridCache, "admit", admit)


def siblings_survive(patch):
    def evict(self, node):
        self.pool.unbind(node.checkpoint.pages[-1])
        node.checkpoint.version += 1

    patch.setattr(CacheStore, "_evict_checkpoint", evict)


def allocate_before_pin(patch):
    hold, make_room, waiting = CacheStore.hold, CacheStore.make_room, []

    def later(self, *lots):
        waiting.append(lots)

    def room(self, count):
        done = make_room(self, count)
        while waiting:
            hold(self, *waiting.pop())
        return done

    patch.setattr(CacheStore, "hold", later)
    patch.setattr(CacheStore, "make_room", room)


def unchained_units(patch):
    real = hashing_module.TokenChain.extend

    def extend(self, ids, images=()):
        start = self._last if not self.digests else bytes(32)
        for token in ids:
            self._last = start
            real(self, [token])

    patch.setattr(hashing_module.TokenChain, "extend", extend)


def forget_salt(patch):
    real = RootKey.digest
    patch.setattr(RootKey, "digest", lambda self: real(replace(self, salt="") if self.salt else self))


def keep_rejected(patch):
    patch.setattr(StepLedger, "_take_back", lambda self, record, kept, step: record.end)


def publish_failed_steps(patch):
    real = StepLedger.settle
    patch.setattr(StepLedger, "settle", lambda self, number, kept, failed: real(self, number, kept, failed=False))


def overwrite_checkpoints(patch):
    real = StepLedger._plan_exports

    def plan(self, lease, start, end):
        exports, found = real(self, lease, start, end)
        if lease.rolling is not None and lease.rolling[0].checkpoint is lease.rolling[1]:
            exports = tuple(replace(e, targets=e.targets[:-1] + lease.rolling[1].pages[-1:]) for e in exports)
        return exports, found

    patch.setattr(StepLedger, "_plan_exports", plan)


def enter_parts(patch):
    real = Transfers.arrived

    def arrived(self, name, part):
        missing = self._under_way[name][2]
        missing.intersection_update({part})
        return real(self, name, part)

    patch.setattr(Transfers, "arrived", arrived)


FAULTS = {
    "resume at token depth": resume_at_token_depth,
    "no copy-on-write": lambda patch: drop_operations(patch, CopyPage),
    "no zeroing": lambda patch: drop_operations(patch, ZeroState),
    "publish at schedule": publish_at_schedule,
    "free before fence": free_before_fence,
    "first node's page": bind_first_node,
    "restore in place": restore_in_place,
    "siblings survive": siblings_survive,
    "allocate before pin": allocate_before_pin,
    "unchained units": unchained_units,
    "salt forgotten": forget_salt,
    "rejected drafts kept": keep_rejected,
    "failed steps published": publish_failed_steps,
    "checkpoint overwritten": overwrite_checkpoints,
    "part of a transfer entered": enter_parts,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    """Without the invariants, which would see some of them from inside: what a request reads must be enough."""
    monkeypatch.setattr(HybridCache, "check_invariants", lambda self, sample=None: None)
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(4):
            drive(seed, 3000, SETTINGS[seed])
