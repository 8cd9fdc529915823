"""Rows of `perilune bench cache`: what retention policies save on synthetic traffic, and what the bookkeeping costs.

The cache of K3 on one of 8 tensor-parallel ranks, as the engine would drive it, but without a model: chunks of up to 8192
tokens a step, prefill and decode mixed, a new request when one fits. All policies replay the same requests with the same
memory, once roomy, once tight; the last part of a row's name is its number of pages. `ours_ms` is the median host time of a step; what was saved is in `extra`:

- `saved_share` of all prompt tokens were not computed again, `saved_share_recency` with evictions by recency alone, and
  `ideal_share` would be with endless memory and a checkpoint at every hash unit;
- `without_state_share` of the tokens had their pages cached, but no checkpoint was that deep;
- `wasted_share` of the checkpoints were evicted without a hit.

A second group of rows times the parts on a prompt of a million tokens.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perilune.bench import harness
from perilune.bench.cache_traces import TRACES, VOCABULARY, Turn
from perilune.bench.harness import Case, Row
from perilune.config.presets import k3
from perilune.errors import ConfigError
from perilune.serve.cache import CacheGeometry, HybridCache, Retention, RootKey, TokenChain, cache_geometry
from perilune.serve.cache.store import CacheEvent

POLICIES = ("dense", "tail", "turns", "second-hit", "interval:32768", "turns+second-hit")
RANKS = 8
POOLS = (1200, 500)  # pages: 34.0 and 14.2 GB on each rank; the agents' contexts alone would fill 1,500
BATCH, BUDGET = 8, 8192  # running requests, tokens of a step
MILLION = 2**20


@dataclass(slots=True)
class Replay:
    """What a replay measured.

    Attributes:
        step_ms: host time of each step, admissions not counted.
        admit_ms: host time of each admission.
        ideal_tokens: prompt tokens whose prefix had been computed before, by whole units.
        hits: of each admission the request's index, and how many of its tokens it skips, and how many had their pages.
        pages_peak: most pages that were not free.
        preempted: requests that had to give their pages back.
    """

    step_ms: list[float] = field(default_factory=list)
    admit_ms: list[float] = field(default_factory=list)
    ideal_tokens: int = 0
    hits: list[tuple[int, int, int]] = field(default_factory=list)
    pages_peak: int = 0
    preempted: int = 0


@dataclass(slots=True)
class _Running:
    index: int
    chain: TokenChain
    left: int  # prompt tokens to compute
    replied: int


class Engine:
    """Drives a cache with a trace as a scheduler would, one step after the other."""

    def __init__(self, cache: HybridCache, trace: Sequence[Turn]) -> None:
        self.cache, self.trace, self.found = cache, trace, Replay()
        self._root = RootKey(model="bench")
        self._seen: set[bytes] = set()
        self._arrivals: list[tuple[int, int]] = [(turn.delay, i) for i, turn in enumerate(trace) if turn.after < 0]
        self._followers: dict[int, list[int]] = {}
        for index, turn in enumerate(trace):
            self._followers.setdefault(turn.after, []).append(index)
        heapq.heapify(self._arrivals)
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        cache.store.on_event = self._hear

    def _hear(self, event: CacheEvent) -> None:
        if event.stored and event.component == "tokens":
            self._seen.add(event.digest)

    def run(self) -> Replay:
        """Replay the whole trace."""
        now = 0
        while self._arrivals or self._waiting or self._running:
            if not self._waiting and not self._running:
                now = max(now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= now:
                index = heapq.heappop(self._arrivals)[1]
                chain = TokenChain(self._root, self.cache.geometry.unit, self.trace[index].prompt)
                self._waiting.append(_Running(index, chain, 0, 0))
            self._admit()
            self._step(now)
            now += 1
        return self.found

    def _admit(self) -> None:
        while self._waiting and len(self._running) < BATCH:
            request = self._waiting[0]
            start = time.perf_counter()
            admission = self.cache.admit(str(request.index), request.chain, self.trace[request.index].message_ends)
            self.found.admit_ms.append(1e3 * (time.perf_counter() - start))
            if admission is None:
                if not self._running:
                    raise ConfigError(f"a trace's request of {len(request.chain)} tokens does not fit into the pool")
                return
            self._waiting.popleft()
            self.found.hits.append((request.index, admission.resume, admission.known))
            request.left = len(request.chain) - admission.resume
            self._running.append(request)
            for digest in request.chain.digests[: (len(request.chain) - 1) // self.cache.geometry.unit]:
                if digest not in self._seen:
                    break
                self.found.ideal_tokens += self.cache.geometry.unit

    def _step(self, now: int) -> None:
        start, budget, chunks = time.perf_counter(), BUDGET - len(self._running), []
        step = self.cache.begin_step()
        for request in self._running:
            count = min(request.left, max(1, budget)) if request.left else 1
            if self.cache.extend(step, str(request.index), count) is None:
                continue
            budget -= count if request.left else 0
            chunks.append((request, count))
        spent, ended = time.perf_counter() - start, []
        for request, count in chunks:
            request.left = max(0, request.left - count)
            if not request.left:  # the step gave the next token
                reply = self.trace[request.index].reply
                request.chain.extend(reply[request.replied : request.replied + 1])
                request.replied += 1
                if request.replied >= len(reply):
                    ended.append(request)
        start = time.perf_counter()
        self.cache.finish_step(step)
        for request in ended:
            self.cache.release(str(request.index))
        self.found.step_ms.append(1e3 * (spent + time.perf_counter() - start))
        self.found.pages_peak = max(self.found.pages_peak, self.cache.store.pool.pages - self.cache.store.pool.free)
        for request in ended:
            self._running.remove(request)
            for index in self._followers.get(request.index, ()):
                heapq.heappush(self._arrivals, (now + 1 + self.trace[index].delay, index))
        if self._running and not chunks:
            youngest = self._running.pop()
            self.cache.release(str(youngest.index))
            self._waiting.appendleft(youngest)
            self.found.preempted += 1


def replay_row(name: str, trace: Sequence[Turn], policy: str, geometry: CacheGeometry, pages: int) -> Row:
    """Replay a trace with both orders of eviction; one row."""
    rows = []
    for eviction in ("work", "recency"):
        cache = HybridCache(geometry, pages, Retention.parse(policy), eviction)
        found = Engine(cache, trace).run()
        cache.check_invariants()
        rows.append((cache.metrics(), found))
    (metrics, found), (by_recency, _) = rows
    counters, prompt = metrics.counters, metrics.counters.prompt_tokens
    created = sum(counters.checkpoints_created.values())
    per_token = geometry.attention_layers * geometry.token_bytes
    steps = sorted(found.step_ms)
    return _row(
        f"cache_{name}_{policy}_{pages}",
        f"{len(trace)} requests, {pages} pages of {geometry.page_tokens} tokens, units of {geometry.unit}",
        steps,
        {
            "saved_share": counters.tokens_hit / prompt,
            "saved_share_recency": by_recency.counters.tokens_hit / by_recency.counters.prompt_tokens,
            "ideal_share": found.ideal_tokens / prompt,
            "without_state_share": counters.tokens_without_state / prompt,
            "saved_tokens": counters.tokens_hit,
            "saved_gb": counters.tokens_hit * per_token / 1e9,
            "copied_gb": counters.tokens_copied * per_token / 1e9,
            "pages_peak": found.pages_peak,
            "checkpoints_created": created,
            "checkpoints_recycled": sum(counters.checkpoints_recycled.values()),
            "checkpoints_used": sum(counters.checkpoints_used.values()),
            "wasted_share": counters.checkpoints_unused / created if created else 0.0,
            "step_p99_ms": steps[int(0.99 * (len(steps) - 1))],
            "admit_p50_ms": statistics.median(found.admit_ms),
            "preempted": found.preempted,
        },
    )


def _row(name: str, shape: str, times: list[float], extra: dict[str, float]) -> Row:
    return Row(
        name=name, shape=shape, ours_ms=statistics.median(times), peer="", peer_ms=None, ratio=None, bound_ms=None,
        device=harness.device_name("cpu"), versions=harness.versions(), commit=harness.commit(),
        ours_spread_ms=(min(times), max(times)), peer_spread_ms=None, samples=len(times), extra=extra,
    )  # fmt: skip


def part_cases(geometry: CacheGeometry, tokens: int = MILLION) -> list[Case]:
    """What single calls cost on a long prompt that is cached, at K3's page and unit unless told otherwise."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, tokens, dtype=np.uint32)
    root = RootKey(model="bench")
    chain = TokenChain(root, geometry.unit, ids)
    cache = HybridCache(geometry, 3 * geometry.pages_for(tokens) + 1200, Retention.parse("tail"))
    cache.admit("first", chain)
    cache.finish_step(_extend(cache, tokens))
    cache.release("first")

    def admit() -> None:
        cache.admit("again", chain)
        cache.release("again")

    def decode_step() -> None:
        step = cache.begin_step()
        for number in range(64):
            assert cache.extend(step, f"d{number}", 1) is not None, "the pool was made large enough"
        cache.finish_step(step)

    def decoding() -> Callable[[], Any]:
        for number in range(64):
            if f"d{number}" not in running:
                running.add(f"d{number}")
                cache.admit(f"d{number}", chain)
                cache.finish_step(_extend(cache, tokens - cache.match(chain).resume, f"d{number}"))
        return decode_step

    running: set[str] = set()
    shape = f"{tokens} tokens, units of {geometry.unit}, pages of {geometry.page_tokens}"
    listed = ids.tolist()
    return [
        Case(name="cache_match_kept", shape=shape, make=lambda: (lambda: cache.match(chain), None)),
        Case(
            name="cache_hash", shape=f"{shape}, array of 32-bit ids", bytes=ids.nbytes,
            make=lambda: (lambda: TokenChain(root, geometry.unit, ids), None),
        ),
        Case(
            name="cache_hash_list", shape=f"{shape}, list of ids", bytes=ids.nbytes,
            make=lambda: (lambda: TokenChain(root, geometry.unit, listed), None),
        ),
        Case(name="cache_admit_release", shape=shape, make=lambda: (admit, None)),
        Case(name="cache_explain", shape=shape, make=lambda: (lambda: cache.explain(chain), None)),
        Case(name="cache_sampled_check", shape=f"64 of {cache.store.pool.pages} pages",
             make=lambda: (lambda: cache.check_invariants(sample=64), None)),
        Case(name="cache_decode_step", shape=f"64 sequences, {shape}", make=lambda: (decoding(), None)),
    ]  # fmt: skip


def _extend(cache: HybridCache, tokens: int, request: str = "first") -> int:
    step = cache.begin_step()
    assert cache.extend(step, request, tokens) is not None, "the pool was made large enough"
    return step


def chosen(policies: Sequence[str]) -> tuple[str, ...]:
    """The policies to compare; "all" stands for `POLICIES`.

    Raises:
        ConfigError: an unknown policy.
    """
    found: dict[str, None] = {}
    for policy in policies:
        found |= dict.fromkeys(POLICIES if policy == "all" else (str(Retention.parse(policy)),))
    return tuple(found)


def run(
    device: str = "cpu",
    budget_seconds: float | None = None,
    policies: Sequence[str] = ("all",),
    *,
    results: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    scale: float = 1.0,
    pools: Sequence[int] = POOLS,
) -> list[Row]:
    """Measure the rows; see `bench.kernels.run`.

    Args:
        device: "cpu"; the cache is host code.
        budget_seconds: no row is begun after this many seconds; None = all rows.
        policies: retention policies, or "all".
        results: a .jsonl file to continue from and to append to.
        on_row: called with each row.
        scale: of the lengths of the traces and of the long prompt.
        pools: numbers of pages to compare.

    Raises:
        ConfigError: another device, an unknown policy, or a pool that a request does not fit into.
    """
    if device != "cpu":
        raise ConfigError(f"bench cache runs on the host: --device cpu; given: {device}")
    geometry, wanted = cache_geometry(k3(), tensor_parallel=RANKS), chosen(policies)
    begun, done, rows = time.monotonic(), harness.known(results, device), []

    def keep(name: str, shape: str, measure: Callable[[], Row]) -> None:
        row = done.get((name, shape))
        if row is None:
            if budget_seconds is not None and time.monotonic() - begun >= budget_seconds:
                return
            row = measure()
            if results is not None:
                harness.append(results, row)
        rows.append(row)
        if on_row is not None:
            on_row(row)

    for name, make in TRACES.items():
        trace = make(np.random.default_rng(0), scale)
        for pages in pools:
            shape = f"{len(trace)} requests, {pages} pages of {geometry.page_tokens} tokens, units of {geometry.unit}"
            for policy in wanted:
                measure = partial(replay_row, name, trace, policy, geometry, pages)
                keep(f"cache_{name}_{policy}_{pages}", shape, measure)
    for case in part_cases(cache_geometry(k3()), int(MILLION * scale)):
        keep(case.name, case.shape, partial(case.measure, device, harness.SAMPLES))
    return rows
