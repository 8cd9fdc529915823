"""Mechanisms that make sandboxes. `driver(name, …)` gives one; each says by its probe what it can do on this machine."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from perilune.errors import ConfigError
from perilune.sandbox.protocol import Driver

_ALL = {
    "proc": ("perilune.sandbox.drivers.proc", "ProcDriver"),
    "qemu": ("perilune.sandbox.drivers.qemu", "QemuDriver"),
    "firecracker": ("perilune.sandbox.drivers.firecracker", "FirecrackerDriver"),
    "docker": ("perilune.sandbox.drivers.docker", "DockerDriver"),
}
# A driver is imported when it is first used: the command line stays quick.
DRIVERS = {name: where for name, where in _ALL.items() if importlib.util.find_spec(where[0]) is not None}
"""Name of a driver -> its module and class."""


def driver(name: str, folder: Path) -> Driver:
    """The driver `name`, with its files under `folder`. Raises ConfigError for an unknown name."""
    if name not in DRIVERS:
        raise ConfigError(f"driver {name!r} is not one of {', '.join(DRIVERS)}")
    module, kind = DRIVERS[name]
    return getattr(importlib.import_module(module), kind)(folder)
