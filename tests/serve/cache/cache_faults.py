"""Faults that other engines had, to be planted into the cache; each must be found by what drives it."""

from __future__ import annotations

from dataclasses import replace

from perilune.serve.cache import CopyPage, HybridCache, RootKey, ZeroState, prefix_cache
from perilune.serve.cache import hashing as hashing_module
from perilune.serve.cache.receive import Transfers
from perilune.serve.cache.steps import StepLedger
from perilune.serve.cache.store import CacheStore
from perilune.serve.cache.trie import PrefixTrie, ancestors


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
        records = self.under_way[-1].records
        if chunk is not None and lease.publishing and records and records[-1].lease is lease:
            record = records[-1]
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
