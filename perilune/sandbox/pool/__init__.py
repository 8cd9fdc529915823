"""Many sandboxes in one process: admitted by memory, kept warm, parked when idle, found again after a crash."""

from __future__ import annotations

from perilune.sandbox.pool.limits import PoolLimits, Usage, Warm
from perilune.sandbox.pool.pool import Pool

__all__ = ["Pool", "PoolLimits", "Usage", "Warm"]
