"""First token of a long prompt whose beginning is cached: in the pool, in the host's memory, in files; or nowhere.

Beside it stands the bare model on the rest of the prompt with the beginning's state at hand, which is what a cache can give
at best. All rows share one engine and one prompt, whose first run is the row without a cache: on a GPU, where the beginning
has 400K tokens, that takes longer than all the others together.

What empties the pool before a sample is not timed. The files are those of an engine that has ended, read by one that has just
begun; they were written a moment ago, so the operating system has them in its memory.
"""

from __future__ import annotations

import gc
import itertools
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench.engine_driver import ONE_CLASS, Driver, model_of, pages_of, random_ids
from perilune.bench.harness import Row, commit, device_name, matmul_ceiling, synchronize, versions
from perilune.model import Transformer
from perilune.model.state import RecurrentState
from perilune.serve.schedule import Limits
from perilune.serve.tiers import DiskTier, Tiers
from perilune.shapes.flops import forward_flops_per_token

HOST_BYTES = DISK_BYTES = 2**33
SECONDS = 4.0  # after which a row takes no further sample, once it has LEAST
LEAST, MOST = 3, 7


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the prompt.

    Attributes:
        prefix: tokens that are cached.
        suffix: tokens behind them.
        chunk: tokens of a pass.
        peer_chunk: of the bare model's passes over the prefix.
        cold: prefixes that are run without a cache.
    """

    prefix: int
    suffix: int
    chunk: int
    peer_chunk: int
    cold: int

    def __str__(self) -> str:
        return f"{self.prefix} + {self.suffix} tokens"


CPU = Sizes(prefix=8192, suffix=512, chunk=512, peer_chunk=8192, cold=3)
GPU = Sizes(prefix=400 * 1024, suffix=4096, chunk=8192, peer_chunk=8192, cold=1)


class BareModel:
    """A model without an engine, and its state after a prefix.

    Args:
        model: to be run.
        sizes: of what it is given.

    Attributes:
        scores: after the last token that it was given, `[Z]`.
    """

    def __init__(self, model: Transformer, sizes: Sizes) -> None:
        self._model, self._sizes = model, sizes
        self._state = model.new_state(1, capacity=sizes.prefix + sizes.suffix)
        self._kept = [
            [torch.zeros_like(getattr(layer, f.name)) for f in fields(layer)] if isinstance(layer, RecurrentState) else []
            for layer in self._state.layers
        ]  # fmt: skip
        self._length = 0
        self.scores = torch.empty(0)

    def _set(self, length: int, kept: list[list[Tensor]]) -> None:
        """Go back to a length; tokens of attention layers behind it are overwritten by what comes."""
        self._state.lengths = [length]
        for layer, tensors in zip(self._state.layers, kept, strict=True):
            for field, tensor in zip(fields(layer), tensors):
                setattr(layer, field.name, tensor.clone())

    @torch.inference_mode()
    def _run(self, ids: list[int], chunk: int) -> None:
        logits = None
        for start in range(0, len(ids), chunk):
            part = torch.tensor([ids[start : start + chunk]], device=self._model.device)
            logits = self._model(part, self._state, logits="last").logits_BTZ
        assert logits is not None
        logits[0, -1].argmax().item()
        self.scores = logits[0, -1]

    def start(self, ids: list[int]) -> None:
        """Run a prefix from the beginning, and keep its state."""
        self._set(0, [[torch.zeros_like(tensor) for tensor in tensors] for tensors in self._kept])
        self._run(ids, self._sizes.peer_chunk)
        self._length = len(ids)
        self._kept = [
            [getattr(layer, f.name).clone() for f in fields(layer)] if tensors else []
            for layer, tensors in zip(self._state.layers, self._kept)
        ]

    def go_on(self, ids: list[int]) -> None:
        """First token after the prefix and these tokens."""
        self._set(self._length, self._kept)
        self._run(ids, self._sizes.chunk)


class CachedPrefix:
    """An engine with a prefix in its cache, and the bare model with its state.

    Args:
        preset: of the model.
        device: where it runs.
        sizes: of the prompt.

    Attributes:
        ids: the prefix.
        cold, peer_cold: seconds that the engine and the bare model took for prefixes that nobody had seen.
    """

    def __init__(self, preset: str, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.model = model_of(preset, device)
        self._seeds = itertools.count(1)
        self._folder = tempfile.TemporaryDirectory()
        self.fetched: list[float] = []
        self.driver, self.tiers = self._engine()
        self.bare = BareModel(self.model, sizes)
        self.cold, self.peer_cold, self.ids = [], [], self.tokens(0)
        for length in (2 * sizes.chunk, *[sizes.prefix] * sizes.cold):  # the first one compiles
            self.ids = random_ids(self.model, length, next(self._seeds))
            self.cold.append(self.timed(self.first, [*self.ids, 0]))  # states behind the whole prefix are kept then
            self.peer_cold.append(self.timed(self.bare.start, self.ids))
            rest = self.tokens(sizes.suffix)
            self.first(self.ids + rest)
            self.bare.go_on(rest)
        del self.cold[0], self.peer_cold[0]

    def tokens(self, count: int) -> list[int]:
        """New random ones."""
        return random_ids(self.model, count, next(self._seeds))

    def timed(self, run: Callable[..., Any], *arguments: Any) -> float:
        """Seconds of a call."""
        synchronize(self.device)
        began = time.perf_counter()
        run(*arguments)
        synchronize(self.device)
        return time.perf_counter() - began

    def _engine(self) -> tuple[Driver, Tiers]:
        sizes = self.sizes
        limits = Limits(step_tokens=sizes.chunk, chunk=sizes.chunk, classes=ONE_CLASS)
        driver = Driver(self.model, pages_of(self.model, 2 * (sizes.prefix + sizes.suffix), 8), limits)
        shape = driver.geometry
        bytes_of = (shape.page_bytes, shape.groups * shape.page_bytes)
        tiers = Tiers(driver.cache, driver.pool, HOST_BYTES, DiskTier(Path(self._folder.name), DISK_BYTES, *bytes_of))
        driver.pool.reserve_host(shape.pages_for(sizes.prefix) + 8 * shape.groups)  # as a server does while it warms up
        return driver, tiers

    def first(self, ids: list[int]) -> None:
        """Bring back what a tier has of a prompt, and draw one token."""
        began = time.perf_counter()
        chain, inbox = self.driver.chain(ids), queue.SimpleQueue()
        self.tiers.prefetch(chain, lambda: inbox.put(None), inbox.put)
        while (command := inbox.get()) is not None:
            command()
        self.fetched.append(time.perf_counter() - began)
        sequence = self.driver.add(ids, chain)
        self.driver.until_first_token(sequence)
        self.skipped = sequence.resume or 0
        self.driver.end(sequence)

    def hit(self, ids: list[int]) -> None:
        """First token of a prompt that begins with the prefix, all of which but a page has been skipped."""
        self.first(ids)
        least = len(self.ids) - 2 * self.driver.geometry.page_tokens
        assert self.skipped > least, f"only {self.skipped} tokens of {len(self.ids)} were a hit"

    def evict(self) -> None:
        """Empty the pool."""
        self.driver.cache.store.make_room(self.driver.cache.store.pool.available)

    def restart(self) -> None:
        """End the engine, which writes everything to files, and begin another one that finds them."""
        self.tiers.close()
        self.driver, self.tiers = self._engine()

    def difference(self) -> float:
        """Of the scores that both saw last: the largest, in standard deviations of the scores."""
        (ours,) = self.driver.scores.values()
        theirs = self.bare.scores.float()
        return float((ours.float() - theirs).abs().max() / theirs.std())


class Shared:
    """A `CachedPrefix` that is made when the first row needs it."""

    def __init__(self, preset: str, device: str, sizes: Sizes) -> None:
        self.preset, self.device, self.sizes = preset, device, sizes

    @cached_property
    def prefix(self) -> CachedPrefix:
        """The one."""
        return CachedPrefix(self.preset, self.device, self.sizes)


@dataclass(frozen=True, kw_only=True)
class PrefixRow:
    """A row `engine_ttft_…`.

    Attributes:
        kind: cold, hit, alone, host or disk.
        peer: what stands beside it.
        shared: engine and prompt.
        goal: ratio that is aimed at.
    """

    kind: str
    peer: str
    shared: Shared
    goal: float | None = None

    @property
    def name(self) -> str:
        """Of the row."""
        return f"engine_ttft_{self.kind}"

    @property
    def shape(self) -> str:
        """Model and lengths."""
        sizes = self.shared.sizes
        return f"{self.shared.preset}, " + (f"{sizes.prefix} tokens" if self.kind == "cold" else str(sizes))

    def measure(self, device: str, samples: int) -> Row:
        """Sample ours and the peer in turn."""
        prefix = self.shared.prefix
        ours, theirs, extra, bound = [], [], {}, None
        if self.goal is not None:
            extra["target_ratio"] = self.goal
        if self.kind == "cold":
            ours, theirs = prefix.cold, prefix.peer_cold
            length = self.shared.sizes.prefix
            flops = length * forward_flops_per_token(prefix.model.cfg, length)
            bound = 1e3 * flops / matmul_ceiling(device, prefix.model.compute_dtype)
            extra["tokens_per_second"] = length / statistics.median(ours)
        else:
            began, enabled = time.perf_counter(), gc.isenabled()
            gc.disable()  # as `harness` does: a collection would be charged to whoever runs then
            try:
                while len(ours) <= MOST and (len(ours) <= LEAST or time.perf_counter() - began < SECONDS):
                    self._sample(prefix, ours, theirs, extra)
            finally:
                if enabled:
                    gc.enable()
            ours, theirs = ours[1:], theirs[1:]  # the first one touches memory for the first time
            if self.kind in ("host", "disk"):
                extra["brought_back_ms"] = 1e3 * statistics.median(prefix.fetched[-len(ours) :])
        ms, peer_ms = 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)
        return Row(
            name=self.name, shape=self.shape, ours_ms=ms, peer=self.peer, peer_ms=peer_ms, ratio=peer_ms / ms,
            bound_ms=bound, device=device_name(device), versions=versions(), commit=commit(),
            ours_spread_ms=(1e3 * min(ours), 1e3 * max(ours)), peer_spread_ms=(1e3 * min(theirs), 1e3 * max(theirs)),
            samples=len(ours), extra=extra,
        )  # fmt: skip

    def _sample(self, prefix: CachedPrefix, ours: list[float], theirs: list[float], extra: dict[str, float]) -> None:
        rest = prefix.tokens(self.shared.sizes.suffix)
        if self.kind == "host":
            written = prefix.timed(prefix.evict)
            extra["written_back_ms"] = max(extra.get("written_back_ms", 0.0), 1e3 * written)
        elif self.kind == "disk":
            prefix.restart()
        if self.kind == "alone":
            theirs.append(prefix.timed(prefix.first, prefix.tokens(len(rest))))
        else:
            theirs.append(prefix.timed(prefix.bare.go_on, rest))
        ours.append(prefix.timed(prefix.hit, prefix.ids + rest))
        if self.kind != "alone":
            extra["score_difference"] = max(extra.get("score_difference", 0.0), prefix.difference())


def rows(preset: str, device: str, sizes: Sizes) -> Iterator[PrefixRow]:
    """All rows of a prefix."""
    shared = Shared(preset, device, sizes)
    behind = "the bare model behind a state at hand"
    one_pass = "one pass" if sizes.peer_chunk >= sizes.prefix else f"passes of {sizes.peer_chunk}"
    yield PrefixRow(kind="cold", peer=f"the bare model in {one_pass}", shared=shared)
    yield PrefixRow(kind="hit", peer=behind, shared=shared, goal=1 / 1.15)
    yield PrefixRow(kind="alone", peer=f"a prompt of {sizes.suffix} tokens", shared=shared)
    yield PrefixRow(kind="host", peer=behind, shared=shared, goal=1 / 1.5)
    yield PrefixRow(kind="disk", peer=behind, shared=shared)
