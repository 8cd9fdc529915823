"""What the pictures of `perilune bench cache` are made from: each trace once more in the tightest pool, and watched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perilune.bench.cache import POOLS, RANKS, Engine
from perilune.bench.cache_traces import TRACES, Turn
from perilune.config.presets import k3
from perilune.serve.administration import describe_pages
from perilune.serve.cache import HybridCache, Retention, cache_geometry
from perilune.serve.settings import EngineSettings

MOMENTS = 60


class WatchedEngine(Engine):
    """An engine that writes down how each request met the cache, and now and then what every page holds.

    Attributes:
        events: a table for each admission, times in steps.
        pages: what each page held, at `MOMENTS` to twice as many moments that lie equally far apart.
    """

    def __init__(self, cache: HybridCache, trace: Sequence[Turn]) -> None:
        super().__init__(cache, trace)
        self._every = 1
        self.events: list[dict[str, Any]] = []
        self.pages: list[dict[str, Any]] = []

    def _step(self, now: int) -> None:
        for index, resume, known in self.found.hits[len(self.events) :]:
            self.events.append(
                {"time": now, "prompt_tokens": len(self.trace[index].prompt), "hit_tokens": resume, "kv_tokens": known}
            )
        super()._step(now)
        if not self.pages or now - self.pages[-1]["at"] >= self._every:
            self.pages.append({"at": now, "pages": describe_pages(self.cache.store.pool)})
        if len(self.pages) == 2 * MOMENTS:
            self.pages, self._every = self.pages[::2], 2 * self._every


def write_details(folder: Path, *, scale: float = 1.0, pages: int = min(POOLS)) -> list[Path]:
    """Replay every trace with the default policy; one file `cache-TRACE.json` each, as `bench.serve.write_details` has them.

    Args:
        folder: made if it is not there.
        scale: of the lengths of the traces.
        pages: of the pool.
    """
    folder.mkdir(parents=True, exist_ok=True)
    policy, written = EngineSettings().retention, []
    geometry = cache_geometry(k3(), tensor_parallel=RANKS)
    for name, make in TRACES.items():
        trace = make(np.random.default_rng(0), scale)
        engine = WatchedEngine(HybridCache(geometry, pages, Retention.parse(policy)), trace)
        engine.run()
        path = folder / f"cache-{name}.json"
        outcome = {"unit": "steps", "requests": [], "events": engine.events, "pages": engine.pages}
        path.write_text(json.dumps({"scenario": name, "outcomes": {policy: outcome}}), encoding="utf-8")
        written.append(path)
    return written
