"""A command that runs in a sandbox, as its caller holds it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from perilune.sandbox.drivers.running import Running
from perilune.sandbox.protocol import GuestLost, Machine, Output, Process, Result

if TYPE_CHECKING:
    from perilune.sandbox.guest_calls import GuestCalls


class Execution:
    """A command that runs: iterate over its output, then take `result()`."""

    def __init__(self, sandbox: GuestCalls, machine: Machine, process: Process, running: Running) -> None:
        self.sandbox, self.process, self.running = sandbox, process, running
        self._machine, self._begun = machine, time.monotonic()
        self._kills = machine.out_of_memory_kills()
        self._result: Result | None = None
        self._outputs = running.outputs()

    def __iter__(self) -> Iterator[Output]:
        return self._outputs

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def kill(self) -> None:
        """End it and what it started; its result still comes."""
        self.running.kill()

    def close(self) -> None:
        """Leave it; if it still runs it is killed."""
        self.process.close()
        self.sandbox._finished(self)

    def result(self) -> Result:
        """Wait for the end; output not taken before is kept as `Limits.output_bytes` allows.

        Raises:
            GuestLost: the whole guest ended.
        """
        if self._result is None:
            try:
                for _ in self._outputs:
                    pass
                done = self.process.finish()
            except GuestLost:
                self.sandbox._lost(self._machine)
                raise
            finally:
                self.close()
            kept, total, killed = self.running.kept, self.running.total, self._machine.out_of_memory_kills()
            self._result = Result(
                code=int(done["code"]), signal=int(done["signal"]), stdout=bytes(kept["stdout"]), stderr=bytes(kept["stderr"]),
                stdout_bytes=total["stdout"], stderr_bytes=total["stderr"], timed_out=self.running.timed_out,
                out_of_memory=killed > self._kills, seconds=time.monotonic() - self._begun, cpu_seconds=float(done["cpu"]),
                peak_bytes=int(done["rss"]), driver=self.sandbox.driver.name, guarantees=self._machine.guarantees,
            )  # fmt: skip
        return self._result
