"""Room for sandboxes: by number, by the memory that they are promised, and by the memory that they really hold."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from perilune.errors import CapacityError
from perilune.sandbox.client import Sandbox
from perilune.sandbox.memory import Memory
from perilune.sandbox.pool.limits import PoolLimits
from perilune.sandbox.protocol import Spec

GUESS = 32 << 20
"""Bytes that a sandbox is expected to hold before one of its kind was measured."""


class Admission:
    """Lets callers make machines while there is room.

    Args:
        limits: see `PoolLimits`.
        holding: sandboxes that have a machine now; called with `changed` held.
        make_room: gives memory back if it can; True if it did.

    Attributes:
        changed: held while what is counted changes, and told of it.
        memory: held by all of them, when it was measured last.
        measured: ids of those that were in it.
    """

    def __init__(self, limits: PoolLimits, holding: Callable[[], list[Sandbox]], make_room: Callable[[], bool]) -> None:
        self.limits, self._holding, self._make_room = limits, holding, make_room
        self.changed = threading.Condition()
        self.memory = Memory()
        self.measured: frozenset[str] = frozenset()
        self._coming: list[tuple[str, Spec]] = []
        self._learned: dict[tuple[str, str], int] = {}

    def note(self, memory: Memory, measured: frozenset[str]) -> None:
        """A new measurement."""
        with self.changed:
            self.memory, self.measured = memory, measured
            self.changed.notify_all()

    def expected(self, driver: str, spec: Spec) -> int:
        """Bytes that one more of this kind will hold, by those that were measured."""
        return self._learned.get((driver, spec.template), min(GUESS, spec.limits.memory_bytes))

    def learn(self, driver: str, spec: Spec, held: int) -> None:
        """Note what one of a kind holds; slow to forget a large one."""
        before = self._learned.get((driver, spec.template), held)
        self._learned[driver, spec.template] = max(held, (9 * before + held) // 10)

    def _refusal(self, driver: str, spec: Spec, count: int) -> str:
        limits, holding = self.limits, self._holding()
        if len(holding) + len(self._coming) + count > limits.sandboxes:
            return f"{len(holding)} sandboxes run, and {limits.sandboxes} may"
        promised = sum(sandbox.spec.limits.memory_bytes for sandbox in holding)
        promised += sum(coming.limits.memory_bytes for _, coming in self._coming) + count * spec.limits.memory_bytes
        if promised > limits.memory_bytes * limits.overcommit:
            return (
                f"memory limits of all sandboxes would be {promised} bytes, and {limits.overcommit:g} times "
                f"{limits.memory_bytes} may be promised"
            )
        held = self.memory.total + sum(self.expected(*coming) for coming in self._coming)
        held += sum(self.expected(box.driver.name, box.spec) for box in holding if box.id not in self.measured)
        held += count * self.expected(driver, spec)
        if held > limits.memory_bytes:
            return f"sandboxes would hold {held} bytes of memory, and {limits.memory_bytes} may be held"
        return ""

    def refuses(self, driver: str, spec: Spec) -> str:
        """Why one more would have to wait now, or ""."""
        with self.changed:
            return self._refusal(driver, spec, 1)

    @contextlib.contextmanager
    def admitted(self, driver: str, spec: Spec, count: int = 1) -> Iterator[None]:
        """Room for `count` more machines while the caller makes them.

        Raises:
            CapacityError: there was none in `PoolLimits.wait_seconds`; says which limit, with numbers.
        """
        deadline = time.monotonic() + self.limits.wait_seconds
        coming = [(driver, spec)] * count
        while True:
            with self.changed:
                why = self._refusal(driver, spec, count)
                if not why:
                    self._coming += coming
                    break
            if not self._make_room():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CapacityError(
                        f"no room for a sandbox: {why}; destroy or pause some, or raise the pool's limits"
                    )
                with self.changed:
                    self.changed.wait(min(left, self.limits.tick_seconds))
        try:
            yield
        finally:
            with self.changed:
                for one in coming:
                    self._coming.remove(one)
                self.changed.notify_all()
