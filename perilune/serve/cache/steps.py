"""Steps under way: chunks are planned in the step begun last, and settled in the order in which steps began."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from perilune.serve.cache.lease import ChunkRecord, Lease, Step
from perilune.serve.cache.plans import Chunk, ExportState
from perilune.serve.cache.publish import Publisher
from perilune.serve.cache.retention import Retention
from perilune.serve.cache.store import CacheStore


class StepLedger:
    """The steps between their planning and their end, with what each has to settle.

    Args:
        store: what is cached.
        publisher: enters results.
        retention: where checkpoints are taken.
    """

    def __init__(self, store: CacheStore, publisher: Publisher, retention: Retention) -> None:
        self.store, self.publisher, self.retention = store, publisher, retention
        self.geometry = store.geometry
        self.under_way: deque[Step] = deque()
        self._next = 1

    def begin(self) -> int:
        """Open the next step."""
        self.under_way.append(Step(self._next))
        self._next += 1
        return self.under_way[-1].number

    def digests_under_way(self) -> dict[bytes, int]:
        """Prefixes that are being computed, with their steps."""
        found: dict[bytes, int] = {}
        for step in self.under_way:
            for record in step.records:
                if record.lease.publishing and not record.lease.released:
                    first, last = record.start // self.geometry.unit, record.end // self.geometry.unit
                    found |= dict.fromkeys(record.lease.chain.digests[first:last], step.number)
        return found

    def extend(self, step: int, lease: Lease, tokens: int) -> Chunk | None:
        """See `HybridCache.extend`."""
        shape, request = self.geometry, lease.request
        assert self.under_way and self.under_way[-1].number == step, f"step {step} is not the one begun last"
        assert tokens >= 1 and lease.last_step != step, f"request {request!r}: {tokens} tokens, or twice in step {step}"
        assert not lease.broken, f"request {request!r} was in a step that failed; release it and admit it again"
        start, end = lease.scheduled, lease.scheduled + tokens
        if end > len(lease.pages) * shape.page_tokens:
            missing = shape.pages_for(end) - len(lease.pages)
            if not self.store.make_room(missing):
                return None
            fresh = self.store.take_tokens(missing)
            lease.pages.extend(fresh)
            lease.held.update(fresh)
        exports, operations, first = (), lease.operations, not lease.last_step
        if tokens > 1 or first or end % shape.unit == 0:
            exports, found = self._plan_exports(lease, start, end)
            self.under_way[-1].records.append(ChunkRecord(lease, start, end, exports, found, first))
            lease.operations = ()
        else:
            self.under_way[-1].plain.append(lease)
        lease.scheduled, lease.last_step = end, step
        return Chunk(request, step, start, end, lease.pages, lease.state, operations, exports)

    def _plan_exports(
        self, lease: Lease, start: int, end: int
    ) -> tuple[tuple[ExportState, ...], tuple[tuple[int, str], ...]]:
        """States to write in a chunk, and points that have a checkpoint already, with the reasons to want them."""
        exports: list[ExportState] = []
        found: list[tuple[int, str]] = []
        unit, digests = self.geometry.unit, lease.chain.digests
        if not self.geometry.groups or not lease.publishing or end // unit == start // unit:
            return (), ()
        points = self.retention.points(
            start, end, unit=unit, prompt=lease.prompt, turn_ends=lease.turn_ends, junction=lease.junction
        )
        for position, reason in points:
            index = position // unit - 1
            node = self.store.trie.nodes.get(digests[index]) if index < len(digests) else None
            if node is not None and node.checkpoint is not None:
                found.append((position, reason))
                continue
            targets, lease.spare = lease.spare, ()
            if not targets:
                if not self.store.make_room(self.geometry.groups):
                    self.store.counters.exports_skipped += 1
                    continue
                targets = self.store.take_state()
            exports.append(ExportState(position, targets, reason))
        return tuple(sorted(exports, key=lambda export: export.position)), tuple(sorted(found))

    def settle(self, number: int, kept: Mapping[str, int], *, failed: bool) -> None:
        """End the oldest step: enter its results, or drop them, and close the requests that waited for its end."""
        assert self.under_way and self.under_way[0].number == number, f"step {number} is not the oldest one under way"
        step = self.under_way.popleft()
        if failed:
            for lease in (*step.plain, *(record.lease for record in step.records)):
                lease.broken, lease.publishing = True, False
        for record in step.records:
            lease = record.lease
            end = record.end
            if lease.request in kept and not lease.released:
                end = self._take_back(record, kept[lease.request], number)
            if lease.publishing and not lease.released:
                self.publisher.commit(record, end)
            else:
                self.store.drop(*(export.targets for export in record.exports))
            if record.first:
                self.store.drop(lease.sources)
                lease.sources = ()
        for lease in step.closing:
            self.close(lease)

    def _take_back(self, record: ChunkRecord, kept: int, step: int) -> int:
        """Forget the tokens of a chunk behind the first `kept`; returns where it ends now."""
        lease, end = record.lease, record.start + kept
        assert 0 <= kept and end <= record.end, f"{kept} tokens kept of a chunk of {record.end - record.start}"
        if end < record.end:
            assert lease.last_step == step, f"request {lease.request!r}: tokens behind rejected ones are under way"
            lease.scheduled = end
        return end

    def release(self, lease: Lease) -> None:
        """Let go of what a request holds, once no step under way may touch it."""
        lease.released = True
        for step in self.under_way:
            if step.number == lease.last_step:
                step.closing.append(lease)
                return
        self.close(lease)

    def close(self, lease: Lease) -> None:
        """Let go now."""
        self.store.use(None, instead_of=lease.last_node)
        self.store.drop(lease.held, lease.sources, lease.state, lease.spare)
