"""A started command from the host's side: feed its input, take its output as it comes, keep its time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from perilune.sandbox.protocol import Output, Process

PIECE = 65536
AFTER_KILL_SECONDS = 10.0
"""How long a killed command may take to be gone; a guest that does not manage is lost."""
_F_GETPIPE_SZ = 1032


@dataclass(slots=True)
class Running:
    """Drives one `Process` to its end.

    Attributes:
        stdin: bytes to send; the command then sees the end of its input.
        source: a descriptor whose content is sent after them, as it comes; -1 = none.
        deadline: `time.monotonic()` at which it is killed.
        keep: bytes of each stream that are kept.
    """

    process: Process
    stdin: bytes
    deadline: float
    keep: int
    source: int = -1
    kept: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    total: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})
    timed_out: bool = False
    killed: bool = False

    def kill(self) -> None:
        """End the command; from any thread."""
        self.killed = True
        self.process.kill()

    def outputs(self) -> Iterator[Output]:
        """Output as it comes, until the command has ended; what a background process writes later is not waited for.

        Raises:
            GuestLost: the guest did not even end the command when told to.
        """
        process = self.process
        readers = {process.stdout: "stdout", process.stderr: "stderr"}
        poll = select.poll()
        for fd in (process.stdin, *readers):
            os.set_blocking(fd, False)
        for fd in (*readers, process.status_fd()):
            poll.register(fd, select.POLLIN)
        pending = memoryview(self.stdin)

        def next_input() -> None:
            """Wait for room if there is something to send, for the source if not, or end the command's input."""
            if pending:
                poll.register(process.stdin, select.POLLOUT)
            elif self.source >= 0:
                poll.register(self.source, select.POLLIN)
            else:
                os.close(process.stdin)
                process.stdin = -1

        next_input()
        deadline, ended = self.deadline, False
        while not ended:
            left = deadline - time.monotonic()
            if left <= 0:
                if self.timed_out:
                    return
                self.timed_out, deadline = True, time.monotonic() + AFTER_KILL_SECONDS
                process.kill()
                continue
            for fd, _ in poll.poll(min(left, 3600.0) * 1000 + 1):
                if fd in readers:
                    data = _read(fd)
                    if data == b"":
                        poll.unregister(fd)
                    elif data:
                        yield self._take(readers[fd], data)
                elif fd == self.source and process.stdin >= 0:
                    poll.unregister(fd)
                    pending = memoryview(os.read(fd, PIECE))
                    if not pending:
                        self.source = -1
                    next_input()
                elif fd == process.stdin:
                    try:
                        pending = pending[os.write(fd, pending[:PIECE]) :]
                    except BlockingIOError:
                        continue
                    except OSError:  # The command reads no more.
                        pending, self.source = pending[:0], -1
                    if not pending:
                        poll.unregister(fd)
                        next_input()
                elif fd == process.status_fd():
                    ended = True
        # All that the command wrote is in the pipes by now, and a pipe holds no more than its size.
        for fd, name in readers.items():
            room = fcntl.fcntl(fd, _F_GETPIPE_SZ)
            while room > 0 and (data := _read(fd)):
                room -= len(data)
                yield self._take(name, data)

    def _take(self, stream: str, data: bytes) -> Output:
        self.total[stream] += len(data)
        kept = self.kept[stream]
        kept += data[: max(0, self.keep - len(kept))]
        return Output(stream, data)


def _read(fd: int) -> bytes | None:
    """A piece, b"" at the end, None if nothing is there."""
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, PIECE)
    return None
