"""The hybrid prefix cache: who may skip which tokens, which pages hold what, and when a written page becomes a hit.

Life of a request: `admit` matches its prompt, pins what it hit, and then takes all pages it needs, or none. In each step,
`extend` plans a chunk; the executor runs the chunk's operations and its forward pass; `finish_step` enters what the step
wrote into the tree. Only then can others hit it, so a step that never ran, or failed, leaves nothing behind. `release` ends
a request at any time, whether it is done, aborted or preempted: what it computed stays, if it was entered, and its pages go
back when the last step that may touch them has finished.

Steps may overlap: several can be under way, and they finish in the order in which they began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from perilune.errors import CapacityError, RequestError
from perilune.serve.cache.block_pool import STATE, TOKENS
from perilune.serve.cache.explain import HitReport, report
from perilune.serve.cache.geometry import CacheGeometry
from perilune.serve.cache.hashing import TokenChain
from perilune.serve.cache.invariants import check_store, check_users
from perilune.serve.cache.lease import ChunkRecord, Lease, Pin, Step
from perilune.serve.cache.metrics import CacheMetrics
from perilune.serve.cache.plans import Admission, Chunk, CopyPage, ExportState, Operation, RestoreState, ZeroState
from perilune.serve.cache.retention import RECYCLED, Retention
from perilune.serve.cache.store import CacheStore
from perilune.serve.cache.trie import Checkpoint, Match, Node, ancestors


class HybridCache:
    """One pool of pages, one tree of prefixes, and the requests that run on them.

    Args:
        geometry: sizes of pages and checkpoints.
        pages: pages of the pool.
        retention: where checkpoints are taken; None = at message ends and where a prefix is seen again.
        eviction: "work" or "recency", see `eviction`.

    Raises:
        ConfigError: no pages, or an unknown order of eviction.
    """

    def __init__(
        self, geometry: CacheGeometry, pages: int, retention: Retention | None = None, eviction: str = "work"
    ) -> None:
        self.geometry = geometry
        self.retention = retention or Retention()
        self.store = CacheStore(geometry, pages, eviction)
        self._leases: dict[str, Lease] = {}
        self._steps: deque[Step] = deque()
        self._next_step = 1
        self._pins: list[Pin] = []

    # ---- looking up

    def match(self, chain: TokenChain) -> Match:
        """How much of a prompt a request could skip now. Changes nothing."""
        assert chain.unit == self.geometry.unit, f"units of {chain.unit} tokens in a cache of {self.geometry.unit}"
        return self.store.trie.match(chain.digests, len(chain))

    def explain(self, chain: TokenChain) -> HitReport:
        """Why a prompt hits as deep as it does and no deeper, component by component."""
        under_way = {}
        for step in self._steps:
            for record in step.records:
                if record.lease.publishing and not record.lease.released:
                    first, last = record.start // self.geometry.unit, record.end // self.geometry.unit
                    under_way |= dict.fromkeys(record.lease.chain.digests[first:last], step.number)
        return report(chain, self.match(chain), self.store.trie, self.store.losses, under_way)

    # ---- requests

    def admit(self, request: str, chain: TokenChain, turn_ends: Sequence[int] = ()) -> Admission | None:
        """Give a request all pages that its prompt and its running state need; None = not now, and nothing changed.

        Args:
            request: an id that no running request has.
            chain: its prompt; append to it what is generated.
            turn_ends: tokens before the end of each message, as the renderer gives them.

        Raises:
            RequestError: an empty prompt, or a message end outside it.
            CapacityError: the pool could not hold it even if it were empty.
        """
        assert request not in self._leases, f"request {request!r} is running already"
        prompt, shape = len(chain), self.geometry
        if not prompt:
            raise RequestError("an empty prompt: a request needs at least 1 token")
        ends = sorted(turn_ends)
        if ends and not 0 <= ends[0] <= ends[-1] <= prompt:
            raise RequestError(f"message ends {ends[0]} to {ends[-1]} do not lie in the prompt's 0 to {prompt} tokens")
        least = shape.pages_for(prompt) + shape.groups
        if least > self.store.pool.pages:
            raise CapacityError(
                f"a prompt of {prompt} tokens needs {least} cache pages, but the pool has {self.store.pool.pages}; "
                "shorten it or give the cache more memory"
            )
        match, publishing = self.match(chain), True
        pages, held, sources = self._hit_pages(match)
        if match.resume and len(held) + len(sources) + self._fresh(prompt, match.resume) > self.store.pool.pages:
            # What a hit pins comes on top of what it needs: even alone it would wait for ever. So it runs cold, and as
            # entering would pin the same pages again, it enters nothing.
            match, publishing = replace(match, resume=0, node=None), False
            pages, held, sources = [], set(), ()
        fresh = self._fresh(prompt, match.resume)
        spare = (
            shape.groups
            if publishing and len(held) + len(sources) + fresh + shape.groups <= self.store.pool.pages
            else 0
        )
        self.store.use(match.node)
        self.store.hold(held, sources)
        if not self.store.make_room(fresh + spare):
            self.store.use(None, instead_of=match.node)
            self.store.drop(held, sources)
            self.store.counters.refused += 1
            return None
        state = self.store.take_state()
        fresh_pages = self.store.take_tokens(fresh - shape.groups)
        lease = Lease(
            request=request, chain=chain, prompt=prompt, turn_ends=ends, junction=match.junction, resume=match.resume,
            pages=pages, held=held, state=state, spare=self.store.take_state() if spare else (), sources=sources,
            operations=(), scheduled=match.resume, published=match.resume // shape.unit, last_node=match.node,
            publishing=publishing,
        )  # fmt: skip
        lease.operations = self._start_operations(lease, match, fresh_pages)
        lease.held.update(fresh_pages)
        self._leases[request] = lease
        self._count_admission(match, prompt)
        return Admission(request, match.resume, match.known, lease.pages, lease.state)

    def _fresh(self, prompt: int, resume: int) -> int:
        """Pages to take for a prompt: those not shared, the copy of a part-filled one among them, and a running state."""
        return self.geometry.pages_for(prompt) - resume // self.geometry.page_tokens + self.geometry.groups

    def _hit_pages(self, match: Match) -> tuple[list[int], set[int], tuple[int, ...]]:
        """Shared whole pages in order, all pages of the prefix, pages of the checkpoint.

        A range of the table is served by the *deepest* node in it: an earlier one may belong to another prefix's page,
        which holds only the beginning of this range.
        """
        if match.node is None:
            return [], set(), ()
        size, table = self.geometry.page_tokens, {}
        held = set()
        for node in ancestors(match.node):
            table.setdefault((node.depth - 1) // size, node.page)
            held.add(node.page)
        checkpoint = match.node.checkpoint
        return [table[i] for i in range(match.resume // size)], held, checkpoint.pages if checkpoint else ()

    def _start_operations(self, lease: Lease, match: Match, fresh_pages: list[int]) -> tuple[Operation, ...]:
        operations: list[Operation] = []
        left = match.resume % self.geometry.page_tokens
        if match.node is not None and left:
            operations.append(CopyPage(match.node.page, fresh_pages[0], left))
            self.store.counters.copies += 1
            self.store.counters.tokens_copied += left
        lease.pages.extend(fresh_pages)
        if lease.state:
            restore = lease.sources and RestoreState(lease.sources, lease.state, match.resume)
            operations.append(restore or ZeroState(lease.state))
        return tuple(operations)

    def _count_admission(self, match: Match, prompt: int) -> None:
        counters, node = self.store.counters, match.node
        counters.requests += 1
        counters.prompt_tokens += prompt
        counters.tokens_hit += match.resume
        counters.tokens_without_state += match.known - match.resume
        counters.tokens_missed += prompt - match.known
        if node is not None and node.checkpoint is not None:
            node.checkpoint.hits += 1
            counters.checkpoints_used[node.checkpoint.reason] += 1
            self.store.queue.touch_checkpoint(node.checkpoint)

    def release(self, request: str) -> None:
        """End a request: done, aborted or preempted. Nothing of a step under way is entered for it any more."""
        lease = self._leases.pop(request, None)
        assert lease is not None, f"request {request!r} is not running"
        lease.released = True
        for step in self._steps:
            if step.number == lease.last_step:
                step.closing.append(lease)
                return
        self._close(lease)

    def _close(self, lease: Lease) -> None:
        self.store.use(None, instead_of=lease.last_node)
        self.store.drop(lease.held, lease.sources, lease.state, lease.spare)

    # ---- steps

    def begin_step(self) -> int:
        """Open the next step and return its number."""
        self._steps.append(Step(self._next_step))
        self._next_step += 1
        return self._steps[-1].number

    def extend(self, step: int, request: str, tokens: int) -> Chunk | None:
        """Plan the next tokens of a request in the step begun last; None = no page for them, and nothing changed.

        Args:
            step: the number that `begin_step` gave.
            request: a running request without a chunk in this step.
            tokens: how many, at least 1; the engine decides, and any split of a sequence is allowed.
        """
        lease, shape = self._leases[request], self.geometry
        assert self._steps and self._steps[-1].number == step, f"step {step} is not the one begun last"
        assert tokens >= 1 and lease.last_step != step, f"request {request!r}: {tokens} tokens, or twice in step {step}"
        assert not lease.broken, f"request {request!r} was in a step that failed; release it and admit it again"
        start, end = lease.scheduled, lease.scheduled + tokens
        missing = shape.pages_for(end) - len(lease.pages)
        if missing > 0:
            if not self.store.make_room(missing):
                return None
            fresh = self.store.take_tokens(missing)
            lease.pages.extend(fresh)
            lease.held.update(fresh)
        exports, found = self._plan_exports(lease, start, end)
        record = ChunkRecord(lease, start, end, exports, found, first=not lease.last_step)
        self._steps[-1].records.append(record)
        operations, lease.operations = lease.operations, ()
        lease.scheduled, lease.last_step = end, step
        return Chunk(request, step, start, end, lease.pages, lease.state, operations, record.exports)

    def _plan_exports(
        self, lease: Lease, start: int, end: int
    ) -> tuple[tuple[ExportState, ...], tuple[tuple[int, str], ...]]:
        """States to write in a chunk, and points that have a checkpoint already, with the reasons to want them."""
        exports: list[ExportState] = []
        found: list[tuple[int, str]] = []
        if not self.geometry.groups or not lease.publishing:
            return (), ()
        unit, digests = self.geometry.unit, lease.chain.digests
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

    def finish_step(self, step: int, kept: Mapping[str, int] | None = None) -> None:
        """The oldest step under way has finished: its bytes are there. Enter what it computed into the tree.

        Args:
            step: its number.
            kept: how many of a chunk's tokens stand, for requests whose drafts were rejected; the others are taken back.
        """
        self._settle(step, kept or {}, failed=False)

    def fail_step(self, step: int) -> None:
        """The oldest step under way failed or never ran: drop all it should have written.

        Its requests' running states are unknown. They must be released; admitted again, they resume from what was
        entered before.
        """
        self.store.counters.steps_failed += 1
        self._settle(step, {}, failed=True)

    def _settle(self, number: int, kept: Mapping[str, int], failed: bool) -> None:
        assert self._steps and self._steps[0].number == number, f"step {number} is not the oldest one under way"
        step = self._steps.popleft()
        for record in step.records:
            lease = record.lease
            if failed:
                lease.broken, lease.publishing = True, False
            end = record.end
            if lease.request in kept and not lease.released:
                end = self._take_back(record, kept[lease.request], number)
            if lease.publishing and not lease.released:
                self._commit(record, end)
            else:
                self.store.drop(*(export.targets for export in record.exports))
            if record.first:
                self.store.drop(lease.sources)
                lease.sources = ()
        for lease in step.closing:
            self._close(lease)

    def _take_back(self, record: ChunkRecord, kept: int, step: int) -> int:
        """Forget the tokens of a chunk behind the first `kept`; returns where it ends now."""
        lease, end = record.lease, record.start + kept
        assert 0 <= kept and end <= record.end, f"{kept} tokens kept of a chunk of {record.end - record.start}"
        if end < record.end:
            assert lease.last_step == step, f"request {lease.request!r}: tokens behind rejected ones are under way"
            lease.scheduled = end
        return end

    def _commit(self, record: ChunkRecord, end: int) -> None:
        lease, unit = record.lease, self.geometry.unit
        units = min(end // unit, len(lease.chain.digests))
        for index in range(lease.published, units):
            self._publish(lease, index)
        for position, reason in record.found:
            if position <= units * unit:
                self._want_checkpoint(lease, self._node_at(lease, position), reason)
        for export in record.exports:
            if export.position <= units * unit:
                self._publish_checkpoint(lease, export)
            else:
                self.store.drop(export.targets)

    def _node_at(self, lease: Lease, position: int) -> Node:
        return self.store.trie.nodes[lease.chain.digests[position // self.geometry.unit - 1]]

    def _publish(self, lease: Lease, index: int) -> None:
        unit, digest = self.geometry.unit, lease.chain.digests[index]
        node = self.store.trie.nodes.get(digest)
        if node is None:
            page = lease.pages[index * unit // self.geometry.page_tokens]
            node = self.store.enter(digest, (index + 1) * unit, lease.last_node, page)
        elif node.page not in lease.held:
            # Another request was first, and our page stays ours alone. What we enter below hangs on its page: hold it,
            # as a running request holds all pages of its prefix. So what is held is closed towards the root, and every
            # page that nobody holds can be evicted, leaves first.
            self.store.hold((node.page,))
            lease.held.add(node.page)
        self.store.use(node, instead_of=lease.last_node)
        lease.last_node, lease.published = node, index + 1

    def _publish_checkpoint(self, lease: Lease, export: ExportState) -> None:
        node = self._node_at(lease, export.position)
        if node.checkpoint is None:
            self.store.enter_checkpoint(node, export.targets, export.position, export.reason)
        else:
            self.store.drop(export.targets)
        self._want_checkpoint(lease, node, export.reason)

    def _want_checkpoint(self, lease: Lease, node: Node, reason: str) -> None:
        """A request has come to a checkpoint, its own or one that it found; the last one it only passed is superseded."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            return  # one that was found, and has been evicted since
        superseded, lease.rolling = lease.rolling, None
        if reason in RECYCLED:
            checkpoint.claims += 1
            lease.rolling = node, checkpoint
        elif checkpoint.reason in RECYCLED:
            checkpoint.reason = reason
        if superseded is not None:
            self._recycle(*superseded)

    def _recycle(self, node: Node, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint once all requests that passed it have a later one, unless somebody resumed from it."""
        checkpoint.claims -= 1
        if node.checkpoint is not checkpoint or checkpoint.claims or checkpoint.hits:
            return  # evicted, and the node may have another one by now; or still wanted
        if checkpoint.reason in RECYCLED and self.store.pool.is_evictable(checkpoint.pages[0]):
            self.store.counters.checkpoints_recycled[checkpoint.reason] += 1
            self.store.lose_checkpoint(node, "recycled: its request went on")

    # ---- running it

    def pin(self, chain: TokenChain) -> Pin | None:
        """Keep the longest cached part of a prompt from being evicted until `unpin`; None = nothing of it is cached."""
        match = self.match(chain)
        if match.node is None:
            return None
        _, held, sources = self._hit_pages(match)
        pin = Pin(match.node, (*held, *sources))
        self.store.use(pin.node)
        self.store.hold(pin.pages)
        self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Undo one `pin`."""
        self._pins.remove(pin)
        self.store.use(None, instead_of=pin.node)
        self.store.drop(pin.pages)

    def reset(self) -> None:
        """Forget all prefixes, as after an update of the weights. Requests run on; what they compute is not entered."""
        for lease in self._leases.values():
            lease.publishing = False
        self.store.forget_all()

    def metrics(self) -> CacheMetrics:
        """A snapshot of counts and pages; its cost grows with the pool's pages by a byte scan only."""
        store, pool = self.store, self.store.pool
        return CacheMetrics(
            counters=deepcopy(store.counters),
            pages=pool.pages,
            free=pool.free,
            tokens_private=pool.count(TOKENS, bound=False),
            tokens_cached=pool.count(TOKENS, bound=True),
            state_private=pool.count(STATE, bound=False),
            state_cached=pool.count(STATE, bound=True),
            evictable=pool.evictable,
            requests=len(self._leases),
            closing=sum(len(step.closing) for step in self._steps),
            prefixes=len(store.trie.nodes),
            checkpoints=len(store.checkpoints),
            page_bytes=self.geometry.page_bytes,
        )

    def check_invariants(self, sample: int | None = None) -> None:
        """Check that pool, tree and requests agree.

        Args:
            sample: pages to check, chosen at random, at a cost that does not grow with the cache; None = everything,
                the count of every page's holders included.

        Raises:
            AssertionError: they do not; the message says where. Nothing has been changed.
        """
        check_store(self.store, sample)
        if sample is None:
            closing = [lease for step in self._steps for lease in step.closing]
            check_users(self.store, [*self._leases.values(), *closing], self._steps, self._pins)
