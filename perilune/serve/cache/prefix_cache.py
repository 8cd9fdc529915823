"""The hybrid prefix cache: who may skip which tokens, which pages hold what, and when a written page becomes a hit.

Life of a request: `admit` matches its prompt, pins what it hit, and then takes all pages it needs, or none. In each step,
`extend` plans a chunk; the executor runs the chunk's operations and its forward pass; `finish_step` enters what the step
wrote into the tree. Only then can others hit it, so a step that never ran, or failed, leaves nothing behind. `release` ends
a request at any time, whether it is done, aborted or preempted: what it computed stays, if it was entered, and its pages go
back when the last step that may touch them has finished.

Steps may overlap: several can be under way, and they finish in the order in which they began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from perilune.errors import CapacityError, RequestError
from perilune.serve.cache.admission import hit_pages, own_pages, start_operations
from perilune.serve.cache.block_pool import STATE, TOKENS
from perilune.serve.cache.explain import HitReport, report
from perilune.serve.cache.geometry import CacheGeometry
from perilune.serve.cache.hashing import TokenChain
from perilune.serve.cache.invariants import check_store, check_users
from perilune.serve.cache.lease import Lease, Pin
from perilune.serve.cache.metrics import CacheMetrics
from perilune.serve.cache.plans import Admission, Chunk
from perilune.serve.cache.publish import Publisher
from perilune.serve.cache.receive import Incoming, Transfers
from perilune.serve.cache.retention import Retention
from perilune.serve.cache.steps import StepLedger
from perilune.serve.cache.store import CacheStore
from perilune.serve.cache.trie import Match


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
        publisher = Publisher(self.store)
        self._ledger = StepLedger(self.store, publisher, self.retention)
        self._transfers = Transfers(self.store, publisher)
        self._pins: list[Pin] = []

    # ---- looking up

    def match(self, chain: TokenChain) -> Match:
        """How much of a prompt a request could skip now. Changes nothing."""
        assert chain.unit == self.geometry.unit, f"units of {chain.unit} tokens in a cache of {self.geometry.unit}"
        return self.store.trie.match(chain.digests, len(chain))

    def explain(self, chain: TokenChain) -> HitReport:
        """Why a prompt hits as deep as it does and no deeper, component by component."""
        under_way = self._ledger.digests_under_way()
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
        hit, own = hit_pages(match.node, shape), own_pages(prompt, match.resume, shape)
        pinned = len(hit.held) + len(hit.sources)
        if pinned + own + shape.groups > self.store.pool.pages:
            # What a hit pins comes on top of what it needs: even alone it would wait for ever. So it runs cold, and as
            # entering would pin the same pages again, it enters nothing.
            match, publishing = replace(match, resume=0, node=None), False
            hit, own, pinned = hit_pages(None, shape), own_pages(prompt, 0, shape), 0
        spare = publishing and pinned + own + 2 * shape.groups <= self.store.pool.pages
        self.store.use(match.node)
        self.store.hold(hit.held, hit.sources)
        if not self.store.make_room(own + (2 if spare else 1) * shape.groups):
            self.store.use(None, instead_of=match.node)
            self.store.drop(hit.held, hit.sources)
            self.store.counters.refused += 1
            return None
        state, pages = self.store.take_state(), self.store.take_tokens(own)
        lease = self._leases[request] = Lease(
            request=request, chain=chain, prompt=prompt, turn_ends=ends, junction=match.junction, resume=match.resume,
            pages=hit.table[: match.resume // shape.page_tokens] + pages, held=hit.held | set(pages),
            state=state, spare=self.store.take_state() if spare else (), sources=hit.sources,
            operations=start_operations(match, hit.sources, pages, state, shape),
            scheduled=match.resume, published=match.resume // shape.unit, last_node=match.node, publishing=publishing,
        )  # fmt: skip
        self._count_admission(match, prompt)
        return Admission(request, match.resume, match.known, lease.pages, lease.state)

    def _count_admission(self, match: Match, prompt: int) -> None:
        counters, node = self.store.counters, match.node
        counters.requests += 1
        counters.prompt_tokens += prompt
        counters.tokens_hit += match.resume
        counters.tokens_without_state += match.known - match.resume
        counters.tokens_missed += prompt - match.known
        left = match.resume % self.geometry.page_tokens
        counters.copies += left > 0
        counters.tokens_copied += left
        if node is not None and node.checkpoint is not None:
            node.checkpoint.hits += 1
            counters.checkpoints_used[node.checkpoint.reason] += 1
            self.store.queue.touch_checkpoint(node.checkpoint)

    def release(self, request: str) -> None:
        """End a request: done, aborted or preempted. Nothing of a step under way is entered for it any more."""
        lease = self._leases.pop(request, None)
        assert lease is not None, f"request {request!r} is not running"
        self._ledger.release(lease)

    # ---- steps

    def begin_step(self) -> int:
        """Open the next step and return its number."""
        return self._ledger.begin()

    def extend(self, step: int, request: str, tokens: int) -> Chunk | None:
        """Plan the next tokens of a request in the step begun last; None = no page for them, and nothing changed.

        Plan decoding before prefill: checkpoints that a chunk writes take pages too, and are evictable only afterwards.

        Args:
            step: the number that `begin_step` gave.
            request: a running request without a chunk in this step.
            tokens: how many, at least 1; the engine decides, and any split of a sequence is allowed.
        """
        return self._ledger.extend(step, self._leases[request], tokens)

    def finish_step(self, step: int, kept: Mapping[str, int] | None = None) -> None:
        """The oldest step under way has finished: its bytes are there. Enter what it computed into the tree.

        Args:
            step: its number.
            kept: how many of a chunk's tokens stand, for requests whose drafts were rejected; the others are taken back, but
                for the first one, which was no draft.
        """
        self._ledger.settle(step, kept or {}, failed=False)

    def fail_step(self, step: int) -> None:
        """The oldest step under way failed or never ran: drop all it should have written.

        Its requests' running states are unknown. They must be released; admitted again, they resume from what was
        entered before.
        """
        self.store.counters.steps_failed += 1
        self._ledger.settle(step, {}, failed=True)

    # ---- running it

    def pin(self, chain: TokenChain) -> Pin | None:
        """Keep the longest cached part of a prompt from being evicted until `unpin`; None = nothing of it is cached."""
        match = self.match(chain)
        if match.node is None:
            return None
        hit = hit_pages(match.node, self.geometry)
        pin = Pin(match.node, tuple(hit.table), hit.sources, (*hit.held, *hit.sources))
        self.store.use(pin.node)
        self.store.hold(pin.held)
        self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Undo one `pin`."""
        self._pins.remove(pin)
        self.store.use(None, instead_of=pin.node)
        self.store.drop(pin.held)

    def receive(self, name: str, chain: TokenChain, tokens: int) -> Incoming | None:
        """Take pages for a prefix that comes from another engine or tier; None = not now, and nothing changed.

        Args:
            name: of the transfer.
            chain: the prefix, or a prompt that begins with it.
            tokens: how many; whole units, not all of which are cached with a checkpoint.
        """
        return self._transfers.receive(name, chain, tokens)

    def arrived(self, name: str, part: str) -> bool:
        """One part of a transfer is there for good. With the last one the prefix is entered; True if this was the last."""
        return self._transfers.arrived(name, part)

    def cancel_transfer(self, name: str) -> None:
        """A transfer failed; call this when nothing writes to its pages any more."""
        self._transfers.cancel(name)

    @property
    def lent(self) -> bool:
        """Whether pins or transfers hold pages, which come back without any request's doing."""
        return bool(self._pins) or any(True for _ in self._transfers.leases())

    def reset(self) -> None:
        """Forget all prefixes, as after an update of the weights. Requests run on; what they compute is not entered."""
        for lease in (*self._leases.values(), *self._transfers.leases()):
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
            closing=sum(len(step.closing) for step in self._ledger.under_way),
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
            steps = self._ledger.under_way
            closing = [lease for step in steps for lease in step.closing]
            leases = [*self._leases.values(), *closing, *self._transfers.leases()]
            check_users(self.store, leases, steps, self._pins, self._transfers.states())
