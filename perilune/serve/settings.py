"""How an engine uses its device: memory for the cache, sizes of a step, what is kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError
from perilune.serve.cache import CacheGeometry, Retention
from perilune.serve.schedule import Limits, ServiceClass, service_classes
from perilune.serve.schedule.pace import PATIENCE

log = logging.getLogger(__name__)
# One H200 takes 5.2 ms for 64 tokens of `mini`, 6.4 for 512, and about twice as much for 8192: small pieces are dear.
STEP_TOKENS = {"cpu": 512, "cuda": 8192}
GRAPHS = "auto", "decode", "off"  # passes that are recorded
WAYS = "full", "fast", "lazy"  # of warming up
DETERMINISTIC_UNIT = 64  # chunks of the deterministic mode: the rows that the kernels of linear attention work in


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        cache_bytes: of the page pool; None = 256 MiB on the CPU; on a GPU 60 % of its free memory, but no more than 256
            requests of the whole context need. It is never less than one of them needs.
        prefix_cache: whether prompts may skip what is cached.
        unit: tokens of a hash unit; None = derived from the model.
        retention: where states are kept, see `cache.retention`.
        eviction: "work" or "recency".
        sequences: most sequences that run at once.
        step_tokens: most tokens of a step; a short request waits for a whole step when it arrives. None = 512 on a CPU,
            8192 on a GPU.
        chunk: most tokens of one prompt in a step; None = `step_tokens`.
        classes: budgets by prompt length; None = three for the context, () = none: one queue for all.
        patience: how long short prompts may have to wait for a piece of a longer one, in times of their own step: more of it
            makes long prompts faster while short ones come, see `schedule.pace`. Not used with `classes`.
        host_bytes: memory of the host behind the pool; 0 = what the pool evicts is lost.
        disk: folder behind that; None = nothing. It outlives the process.
        disk_bytes: most bytes in it.
        overlap: whether the next step is planned while the device works on the last one; None = where it pays off, see
            `overlap`.
        cuda_graphs: which passes are recorded on a GPU: "auto" = all that can be, "decode" = those of decoding alone, "off" = none.
        warm_up: what is done before the first request: "full" = all kernels are compiled and all passes recorded that
            requests can need; "fast" = all but those of scored prompts, pictures and caches too long for a recording;
            "lazy" = nothing, the first requests wait for it.
        deterministic: a request's tokens do not depend on its company, bit by bit (fp32 on the CPU). Chunks are then as
            long as a hash unit, decoding goes in groups of eight, and answers are not cached, only prompts.

    Raises:
        ConfigError: a value out of range.
    """

    cache_bytes: int | None = None
    prefix_cache: bool = True
    unit: int | None = None
    retention: str = "turns+second-hit"
    eviction: str = "work"
    sequences: int = 64
    step_tokens: int | None = None
    chunk: int | None = None
    classes: tuple[ServiceClass, ...] | None = None
    patience: float = PATIENCE
    host_bytes: int = 0
    disk: Path | None = None
    disk_bytes: int = 2**34
    overlap: bool | None = None
    cuda_graphs: str = "auto"
    warm_up: str = "full"
    deterministic: bool = False

    def __post_init__(self) -> None:
        Retention.parse(self.retention)
        for name in ("cache_bytes", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value} must not be negative")
        for name, allowed in (("cuda_graphs", GRAPHS), ("warm_up", WAYS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}")
        if not self.patience > 0:
            raise ConfigError(f"patience={self.patience} must be above 0; 1 is one step of short prompts")
        for name in ("unit", "step_tokens", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")

    @property
    def hash_unit(self) -> int | None:
        """Tokens of a hash unit; None = derived from the model."""
        return DETERMINISTIC_UNIT if self.deterministic and self.unit is None else self.unit

    def limits(self, geometry: CacheGeometry, context_length: int, device: str = "cpu") -> Limits:
        """Of the scheduler, on a device of this type."""
        step_tokens = self.step_tokens or STEP_TOKENS.get(device, STEP_TOKENS["cpu"])
        classes = service_classes(context_length, self.patience) if self.classes is None else self.classes
        if not classes:
            classes = (ServiceClass(name="all", up_to=2**62),)
        return Limits(
            sequences=self.sequences, step_tokens=step_tokens, chunk=self.chunk or step_tokens, classes=classes,
            grid=geometry.unit if self.deterministic else 0,
        )  # fmt: skip

    def pages(self, geometry: CacheGeometry, context_length: int, free_bytes: int | None) -> int:
        """Of the pool.

        Args:
            geometry: sizes.
            context_length: tokens that one request can have.
            free_bytes: of the device's memory; None = the CPU.

        Returns:
            Pages of `cache_bytes`, and at least so many that one request of the longest kind always finds room: with a
            warning where that is more than was asked for, unless that was 0, "as little as possible".
        """
        wanted = self.cache_bytes
        if wanted is None:
            wanted = 2**28
            if free_bytes is not None:
                whole = (geometry.pages_for(context_length) + 4 * geometry.groups) * geometry.page_bytes
                wanted = min(int(0.6 * free_bytes), 256 * whole)
        # A hit pins the pages it copies from beside its own, and a checkpoint is written while the last one is held.
        least = 2 * geometry.pages_for(context_length) + 4 * geometry.groups + 2
        if self.cache_bytes and wanted < least * geometry.page_bytes:
            log.warning(
                "cache_bytes=%d is less than an answer of %d tokens and its hit need; %d are taken (a shorter context takes less)",
                wanted, context_length, least * geometry.page_bytes,
            )  # fmt: skip
        return max(least, wanted // geometry.page_bytes)
