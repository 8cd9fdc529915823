"""Which implementation of an operation runs, and why.

Each operation with more than one implementation has a `select(...)` that returns a `Choice`; the public function
dispatches on it, `perilune doctor --ops` prints it. Nothing falls back silently: the reason says what was missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

from perilune.errors import ConfigError

IMPLEMENTATIONS = ("reference", "torch", "native", "triton", "cuda")


class Choice(NamedTuple):
    """An implementation's name (one of `IMPLEMENTATIONS`) and the reason it was taken."""

    implementation: str
    reason: str


def _checked(name: str | None) -> str | None:
    if name is not None and name not in IMPLEMENTATIONS:
        raise ConfigError(
            f"unknown op implementation {name!r}; allowed: {', '.join(IMPLEMENTATIONS)}; unset PERILUNE_OPS to let each op choose"
        )
    return name


@lru_cache
def _from_environment() -> str | None:
    """PERILUNE_OPS, read once: every operation asks on every call."""
    return _checked(os.environ.get("PERILUNE_OPS") or None)


_forced: ContextVar[str | None] = ContextVar("perilune_ops", default=None)


def forced() -> str | None:
    """Return the implementation that `force` or the environment variable PERILUNE_OPS (at the first call) demands, or None.

    Raises:
        ConfigError: PERILUNE_OPS holds an unknown name.
    """
    return _forced.get() or _from_environment()


@contextmanager
def force(name: str) -> Iterator[None]:
    """Within the block every `select` takes the implementation `name` where it exists (tests, benchmarks).

    Raises:
        ConfigError: `name` is unknown.
    """
    token = _forced.set(_checked(name))
    try:
        yield
    finally:
        _forced.reset(token)
