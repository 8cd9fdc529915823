"""First token of a prompt whose prefix the pool has given up: it comes back from the host's memory, or from files.

Beside the bare model on the rest of the prompt with the prefix's state at hand. What empties the pool before each sample is
not timed. The files are those of an engine that has ended, read by one that has just begun; they were written a moment ago,
so the operating system has them in its memory.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.bench.engine_driver import ONE_CLASS, Driver, pages_of, random_ids
from perilune.bench.harness import Row, commit, device_name, synchronize, versions
from perilune.model import Transformer
from perilune.serve.schedule import Limits
from perilune.serve.tiers import DiskTier, Tiers

HOST_BYTES = DISK_BYTES = 2**32
SAMPLES = 7


def behind_state(model: Transformer, prefix: list[int], suffix: int) -> Callable[[list[int]], None]:
    """First token after `suffix` further tokens on the bare model; the state of the prefix is at hand, to be copied."""
    with torch.inference_mode():
        kept = model.new_state(1, capacity=len(prefix) + suffix)
        for start in range(0, len(prefix), 512):
            model(torch.tensor([prefix[start : start + 512]], device=model.device), kept, logits="none")

    @torch.inference_mode()
    def run(ids: list[int]) -> None:
        state, logits = kept.clone(), None
        for start in range(0, len(ids), 512):
            part = torch.tensor([ids[start : start + 512]], device=model.device)
            logits = model(part, state, logits="last").logits_BTZ
        assert logits is not None
        logits[0, -1].argmax().item()

    return run


@dataclass(frozen=True, kw_only=True)
class TierHit:
    """A row: `engine_ttft_host` or `engine_ttft_disk`.

    Attributes:
        model: served.
        prefix, suffix: tokens of the prompt that come back, and behind them.
        disk: from files instead of the host's memory.
        goal: ratio that is aimed at.
    """

    model: Transformer
    prefix: int
    suffix: int
    disk: bool
    goal: float
    name: str
    shape: str

    def measure(self, device: str, samples: int) -> Row:
        """Sample ours and the peer in turn."""
        model, base, seeds = self.model, random_ids(self.model, self.prefix), itertools.count(1)
        behind = behind_state(model, base, self.suffix)
        ours: list[float] = []
        theirs: list[float] = []
        copied: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            driver, tiers = self._engine(Path(folder))
            self._first(driver, tiers, base, 0, copied)
            for _ in range(SAMPLES + 1):
                if self.disk:
                    tiers.close()
                    driver, tiers = self._engine(Path(folder))
                else:
                    driver.cache.store.make_room(driver.cache.store.pool.available)
                new = random_ids(model, self.suffix, next(seeds))
                ours.append(_timed(device, self._first, driver, tiers, base + new, self.prefix, copied))
                theirs.append(_timed(device, behind, random_ids(model, self.suffix, next(seeds))))
            tiers.close()
        ours, theirs, copied = ours[1:], theirs[1:], copied[2:]  # the first ones compile and touch memory
        ms, peer_ms = statistics.median(ours), statistics.median(theirs)
        return Row(
            name=self.name, shape=self.shape, ours_ms=ms, peer="the bare model behind a state at hand", peer_ms=peer_ms,
            ratio=peer_ms / ms, bound_ms=None, device=device_name(device), versions=versions(), commit=commit(),
            ours_spread_ms=(min(ours), max(ours)), peer_spread_ms=(min(theirs), max(theirs)), samples=len(ours),
            extra={"target_ratio": self.goal, "brought_back_ms": statistics.median(copied)},
        )  # fmt: skip

    def _engine(self, folder: Path) -> tuple[Driver, Tiers]:
        tokens = 4 * (self.prefix + self.suffix)
        driver = Driver(
            self.model, pages_of(self.model, tokens, 8), Limits(step_tokens=512, chunk=512, classes=ONE_CLASS)
        )
        shape = driver.geometry
        sizes = (shape.page_bytes, shape.groups * shape.page_bytes)
        disk = DiskTier(folder, DISK_BYTES, *sizes) if self.disk else None
        return driver, Tiers(driver.cache, driver.pool, HOST_BYTES, disk)

    @staticmethod
    def _first(driver: Driver, tiers: Tiers, ids: list[int], least: int, copied: list[float]) -> None:
        """Bring back what can be, and draw one token; `least` tokens must have been skipped but for a page."""
        began = time.perf_counter()
        chain, inbox = driver.chain(ids), queue.SimpleQueue()
        tiers.prefetch(chain, lambda: inbox.put(None), inbox.put)
        while (command := inbox.get()) is not None:
            command()
        copied.append(1e3 * (time.perf_counter() - began))
        sequence = driver.add(ids, chain)
        driver.until_first_token(sequence)
        assert (sequence.resume or 0) > least - 2 * driver.geometry.page_tokens, f"only {sequence.resume} tokens hit"
        driver.end(sequence)


def _timed(device: str, run: Callable[..., None], *arguments: Any) -> float:
    """Milliseconds of a call."""
    synchronize(device)
    began = time.perf_counter()
    run(*arguments)
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)
