"""Commands and connections that go through a sandbox service, as their callers hold them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from perilune.errors import PeriluneError
from perilune.sandbox.connection import Feeder, Stream
from perilune.sandbox.protocol import Guarantee, GuestLost, NoSuchSandbox, Output, Result

if TYPE_CHECKING:
    from perilune.sandbox.remote import RemoteSandbox


class RemoteExecution:
    """A command that runs at a service; the calls of `Execution`."""

    def __init__(self, sandbox: RemoteSandbox, header: Mapping[str, Any], stdin: bytes | int) -> None:
        self.sandbox = sandbox
        self._keep = sandbox.spec.limits.output_bytes
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._result: dict[str, Any] | None = None
        first = json.dumps(header).encode() + b"\n" + (b"" if isinstance(stdin, int) else stdin)
        self._stream: Stream = sandbox.connection.stream(sandbox._path("/exec"), first)
        self._feeder: Feeder | None = None
        try:
            if isinstance(stdin, int):
                self._feeder = Feeder(self._stream, stdin)
            else:
                self._stream.send(b"")
            self._events = self._stream.events()
            self._command = next(self._events)["command"]
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Output]:
        for event in self._events:
            if "result" in event:
                self._result = event["result"]
                return
            output = Output(event["stream"], base64.b64decode(event["data"]))
            kept = self._kept[output.stream]
            kept += output.data[: max(0, self._keep - len(kept))]
            yield output

    def __enter__(self) -> RemoteExecution:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def kill(self) -> None:
        """End it and what it started; its result still comes."""
        with contextlib.suppress(NoSuchSandbox):  # It has ended.
            self.sandbox.connection.request("DELETE", f"/v1/commands/{self._command}")

    def close(self) -> None:
        """Leave it; if it still runs it is killed."""
        self._stream.close()
        if self._feeder is not None:
            self._feeder.end()
            self._feeder = None

    def result(self) -> Result:
        """See `Execution.result`."""
        try:
            for _ in self:
                pass
        finally:
            self.close()
        assert self._result is not None, "a stream without an error ends with a result"
        values = {name: value for name, value in self._result.items() if name != "truncated"}
        values["guarantees"] = tuple(Guarantee(**one) for one in values["guarantees"])
        return Result(**values, stdout=bytes(self._kept["stdout"]), stderr=bytes(self._kept["stderr"]))


class RemoteTerminal:
    """A program on a pseudo-terminal at a service, as `cli/terminal.py` relays one: `terminal` takes keys and gives output."""

    def __init__(self, sandbox: RemoteSandbox, header: Mapping[str, Any]) -> None:
        self._connection = sandbox.connection
        self._stream = sandbox.connection.stream(sandbox._path("/exec"), json.dumps(header).encode() + b"\n")
        try:
            self._events = self._stream.events()
            self._command = next(self._events)["command"]
        except BaseException:
            self._stream.close()
            raise
        ours, theirs = socket.socketpair()
        self.terminal = ours.detach()
        self._other = theirs
        self._ended, self._end = os.pipe()
        self._result: dict[str, Any] = {}
        self._feeder = Feeder(self._stream, theirs.fileno())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(PeriluneError, OSError):
            for event in self._events:
                if "result" in event:
                    self._result = event["result"]
                else:
                    self._other.sendall(base64.b64decode(event["data"]))
        os.close(self._end)

    def status_fd(self) -> int:
        """Readable when the program has ended."""
        return self._ended

    def resize(self, rows: int, columns: int) -> None:
        """See `protocol.Process`."""
        try:
            self._connection.json("PUT", f"/v1/commands/{self._command}/window", {"rows": rows, "columns": columns})
        except PeriluneError as error:
            raise OSError(f"the service does not resize the terminal: {error}") from error

    def finish(self) -> Mapping[str, Any]:
        """`code` and `signal`. Raises GuestLost if they never came."""
        self._thread.join()
        if not self._result:
            raise GuestLost("the connection to the sandbox service ended before the program did")
        return self._result

    def close(self) -> None:
        """Leave it; if it still runs it is killed."""
        self._stream.close()
        self._feeder.end()
        self._thread.join()
        self._other.close()
        for fd in (self.terminal, self._ended):
            os.close(fd)


def to_service(sock: socket.socket, stream: Stream) -> None:
    with contextlib.suppress(OSError):
        while data := sock.recv(65536):
            stream.send(data)
        stream.send(b"")


def from_service(sock: socket.socket, stream: Stream) -> None:
    with contextlib.suppress(OSError, PeriluneError, ValueError):
        while data := stream.read():
            sock.sendall(data)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    # Whoever holds the other end sees the end, and closes it; then this one can go.
    with contextlib.suppress(OSError):
        while sock.recv(65536):
            pass
    stream.close()
    sock.close()
