"""What the cache did, component by component: pages of tokens and checkpoints of states fail for different reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.serve.cache.retention import REASONS


def _by_reason() -> dict[str, int]:
    return dict.fromkeys(REASONS, 0)


@dataclass(kw_only=True, slots=True)
class Counters:
    """Counts since the cache was made; they only grow.

    Attributes:
        requests: admitted; a request that was preempted and admitted again counts twice.
        refused: times that an admission found too few pages.
        prompt_tokens: of all admitted requests; the sum of the next three.
        tokens_hit: not computed again.
        tokens_without_state: pages were cached, but no checkpoint was that deep.
        tokens_missed: no cached page.
        checkpoints_created, checkpoints_used, checkpoints_evicted, checkpoints_recycled: by the reason for which they
            were taken; `used` counts hits, `recycled` those superseded by the next one of their request.
        checkpoints_unused: evicted without a hit: wasted writes.
        exports_skipped: wanted by the policy, but there was no page for them.
        copies: part-filled pages that were copied.
        tokens_copied: cached tokens in these.
        pages_evicted: pages of cached tokens that were given up.
        steps_failed: steps whose results were dropped.
        resets: times that everything was forgotten.
    """

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    tokens_hit: int = 0
    tokens_without_state: int = 0
    tokens_missed: int = 0
    checkpoints_created: dict[str, int] = field(default_factory=_by_reason)
    checkpoints_used: dict[str, int] = field(default_factory=_by_reason)
    checkpoints_evicted: dict[str, int] = field(default_factory=_by_reason)
    checkpoints_recycled: dict[str, int] = field(default_factory=_by_reason)
    checkpoints_unused: int = 0
    exports_skipped: int = 0
    copies: int = 0
    tokens_copied: int = 0
    pages_evicted: int = 0
    steps_failed: int = 0
    resets: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheMetrics:
    """A snapshot.

    Attributes:
        counters: see `Counters`.
        pages: of the pool; the sum of the next five.
        free: nobody's.
        tokens_private: hold tokens of running requests only.
        tokens_cached: hold tokens of cached prefixes.
        state_private: running states and checkpoints that are being written.
        state_cached: checkpoints.
        evictable: cached pages that no request, operation or pin holds.
        requests: running.
        closing: released, but a step that used them is under way.
        prefixes: nodes of the tree.
        checkpoints: that a request could resume from.
        page_bytes: of each page.
    """

    counters: Counters
    pages: int
    free: int
    tokens_private: int
    tokens_cached: int
    state_private: int
    state_cached: int
    evictable: int
    requests: int
    closing: int
    prefixes: int
    checkpoints: int
    page_bytes: int

    @property
    def used(self) -> float:
        """Share of the pool that running requests need: what an admission could not get even by evicting."""
        return 1.0 - (self.free + self.evictable) / self.pages
