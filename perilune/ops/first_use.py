"""What happens when something is needed for the first time: a kernel is compiled or loaded, a pass is recorded.

Each takes as long as many passes. Whoever has requests waiting wants to know of it: listeners hear what it was, and the
seconds it took, on the thread that needed it.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any, Protocol


class Listener(Protocol):
    """Hears of first uses; it is not kept alive for it."""

    def __call__(self, what: str, seconds: float) -> None: ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Tell a listener from now on."""
    _hear_triton()
    with _lock:
        _listeners.add(listener)


def tell(what: str, seconds: float) -> None:
    """Something was needed for the first time, and took so long."""
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener(what, seconds)


@cache
def _hear_triton() -> None:
    """Hear of kernels that Triton compiles, or finds compiled on disk. It has room for one listener: one that is there is kept."""
    from perilune.ops.triton.available import interpreted, missing

    if interpreted() or missing() is not None:
        return
    from triton import knobs

    before = knobs.compilation.listener

    def hear(**about: Any) -> None:
        if before is not None:
            before(**about)
        how = "loaded" if about["cache_hit"] else "compiled"
        tell(f"{how} {_name(about['src'])}", about["times"].total / 1e6)

    knobs.compilation.listener = hear


def _name(source: Any) -> str:
    """Of a kernel of Triton: its file and what it is called there."""
    module = getattr(getattr(source, "fn", None), "__module__", None) or "Triton"
    return f"{module.rpartition('.')[2]}.{getattr(source, 'name', 'kernel')}"
