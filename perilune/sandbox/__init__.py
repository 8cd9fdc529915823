"""Sandboxes for agents: create, run, save, fork, pause, resume, with a driver that says what it guarantees."""

from __future__ import annotations

import importlib
from typing import Any

# Imported when first used: the fork server imports this package too, and stays small.
_PUBLIC = {
    "Sandboxes": "sandboxes", "Sandbox": "client", "Execution": "execution", "AsyncSandboxes": "asynchronous",
    "AsyncSandbox": "asynchronous", "RemoteSandboxes": "remote", "RemoteSandbox": "remote", "Pool": "pool", "PoolLimits": "pool", "Spec": "protocol", "Limits": "protocol", "Result": "protocol", "Output": "protocol",
    "State": "protocol", "Probe": "protocol", "PythonSession": "session", "StepManifest": "manifest", "TrajectoryLog": "manifest", "Store": "store",
}  # fmt: skip
__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'perilune.sandbox' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
    return getattr(importlib.import_module(f"perilune.sandbox.{_PUBLIC[name]}"), name)
