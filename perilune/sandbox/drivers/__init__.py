"""Mechanisms that make sandboxes. `driver(name, …)` gives one; each says by its probe what it can do on this machine."""

from __future__ import annotations

from pathlib import Path

from perilune.errors import ConfigError
from perilune.sandbox.drivers.proc import ProcDriver
from perilune.sandbox.protocol import Driver

DRIVERS: dict[str, type[ProcDriver]] = {"proc": ProcDriver}


def driver(name: str, folder: Path) -> Driver:
    """The driver `name`, with its files under `folder`. Raises ConfigError for an unknown name."""
    if name not in DRIVERS:
        raise ConfigError(f"driver {name!r} is not one of {', '.join(DRIVERS)}")
    return DRIVERS[name](folder)
