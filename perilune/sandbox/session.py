"""A Python session in a sandbox whose state is in its snapshots, although the driver saves no process.

session = PythonSession(box)
session.run("import json\nx = [1, 2]\nw = arena.block('weights', 10_000_000)")
snapshot = box.checkpoint()                       # of the block only the pages written since the last one
again = PythonSession(sandboxes.resume(snapshot.id))
again.run("x")                                    # [1, 2]

`guest/session.py` is what runs there, and says what is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import SandboxError
from perilune.sandbox.client import Sandbox
from perilune.sandbox.protocol import GuestLost, Output

PROGRAM = Path(__file__).parent / "guest/session.py"
PLACE = "/opt/perilune/session.py"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a cell did.

    Attributes:
        output: what it printed.
        value: repr of its last expression, or None.
        error: traceback, or None.
        unkept: names whose values no snapshot will hold.
    """

    output: str
    value: str | None
    error: str | None
    unkept: tuple[str, ...]


class PythonSession:
    """A session that runs cells one after the other. A checkpoint between two cells has what the cells before it left.

    Args:
        sandbox: running; a session that was in the one that it was restored or forked from goes on.
        python: interpreter in the guest.
        arena_bytes: room for `arena.block`; taken from memory as it is written.
        timeout: seconds that the session may live; None = `Limits.exec_seconds`.

    Attributes:
        tracked: "" if the kernel tracks writes to the arena, else why not; a checkpoint then reads all of it.

    Raises:
        SandboxError: it did not start; says what the guest said.
    """

    def __init__(
        self, sandbox: Sandbox, *, python: str = "python3", arena_bytes: int = 64 << 20, timeout: float | None = None
    ) -> None:
        sandbox.write_file(PLACE, PROGRAM.read_bytes())
        read, self._input = os.pipe()
        self._source = read
        self._errors = bytearray()
        try:
            self._execution = sandbox.start(
                [python, "-I", PLACE, str(arena_bytes)],
                stdin=read,
                timeout=timeout,
                env={"PYTHONDONTWRITEBYTECODE": "1"},
            )
            self._lines = self._replies(iter(self._execution))
            self.tracked = str(json.loads(next(self._lines))["tracked"])
        except StopIteration:
            self.close()
            raise SandboxError(
                f"the Python session did not start: {self._errors.decode(errors='replace').strip()}"
            ) from None
        except BaseException:
            os.close(read)
            os.close(self._input)
            raise

    def __enter__(self) -> PythonSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _replies(self, outputs: Iterator[Output]) -> Iterator[str]:
        begun = b""
        for output in outputs:
            if output.stream == "stderr":
                self._errors = (self._errors + output.data)[-65536:]
                continue
            *lines, begun = (begun + output.data).split(b"\n")
            for line in lines:
                yield line.decode()

    def run(self, code: str) -> Reply:
        """Run a cell. Raises GuestLost when the session has ended; what its last whole cell left is kept."""
        try:
            os.write(self._input, json.dumps({"code": code}).encode() + b"\n")
            reply = json.loads(next(self._lines))
        except (StopIteration, OSError):
            self.close()
            said = self._errors.decode(errors="replace").strip()
            raise GuestLost(f"the Python session has ended: {said or 'its time was over, or it was killed'}") from None
        return Reply(reply["output"], reply["value"], reply["error"], tuple(reply["unkept"]))

    def close(self) -> None:
        """End it; what it has kept stays in the sandbox. A second call does nothing."""
        self._execution.close()
        for fd in {self._source, self._input} - {-1}:
            os.close(fd)
        self._source = self._input = -1
