"""What a pool may use, and what it does use."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.errors import ConfigError
from perilune.sandbox.memory import Memory, available
from perilune.sandbox.protocol import Spec


def _most_memory() -> int:
    return available() * 3 // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """What a pool may use, and when it acts.

    Attributes:
        memory_bytes: that its sandboxes may really hold (`memory.Memory.total`); default: three quarters of what is free now.
        overcommit: the sum of their `Limits.memory_bytes` may be that many times `memory_bytes`.
        sandboxes: that hold a machine at once.
        wait_seconds: that a call waits for room before it is refused.
        idle_seconds: without use after which a sandbox is parked (paused to the store), unless it has a time of its own; 0 = never.
        park_seconds: without use after which it may be parked to make room for another.
        lifetime_seconds: after which it is removed, unless it has a time of its own; 0 = never.
        snapshot_seconds: between recovery snapshots of a sandbox that is in use; 0 = none.
        lost_seconds: that a lost sandbox stays listed.
        tick_seconds: between two looks of the reaper.
    """

    memory_bytes: int = field(default_factory=_most_memory)
    overcommit: float = 8.0
    sandboxes: int = 1000
    wait_seconds: float = 30.0
    idle_seconds: float = 300.0
    park_seconds: float = 2.0
    lifetime_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    lost_seconds: float = 86400.0
    tick_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:  # Also for what is no number.
                raise ConfigError(f"pool limit {name}={getattr(self, name)!r} must not be below zero")
        if self.overcommit < 1 or not self.memory_bytes or not self.sandboxes or not self.tick_seconds:
            raise ConfigError(
                "a pool's overcommit must be 1 or more, and memory_bytes, sandboxes, tick_seconds above zero"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Warm:
    """Sandboxes that wait, made, for a `create` of just this kind."""

    driver: str
    spec: Spec
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a pool holds.

    Attributes:
        held, paused, warm: sandboxes with a machine (those kept warm among them), without one, and kept warm.
        promised_bytes: sum of their `Limits.memory_bytes`.
        memory: measured, of all with a machine, at the last look.
        allowed_bytes: `PoolLimits.memory_bytes`.
        store_bytes: of the snapshot store, whose bytes are all that a paused sandbox costs.
    """

    held: int
    paused: int
    warm: int
    promised_bytes: int
    memory: Memory
    allowed_bytes: int
    store_bytes: int

    @property
    def overcommit(self) -> float:
        """Promised memory over what is really held; 0 while nothing is."""
        return self.promised_bytes / self.memory.total if self.memory.total else 0.0
