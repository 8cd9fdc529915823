"""HTTP to a sandbox service with the standard library: requests with typed errors, and streams that go both ways."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from perilune.errors import ConfigError, PeriluneError, SandboxError
from perilune.sandbox.protocol import GuestLost
from perilune.sandbox.wire_errors import rebuilt

CALL_SECONDS = 120.0
"""Most silence of a service that answers one request, and of a stream between two heartbeats."""
PIECE = 65536


class Connection:
    """Where a service listens, and the key that it wants.

    Args:
        url: like http://127.0.0.1:8010; https works too.
        key: bearer key, or None.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a sandbox service; it looks like http://127.0.0.1:8010")
        self.url, self._parts = url.rstrip("/"), parts
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def _open(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=CALL_SECONDS)

    def _failed(self, error: Exception) -> SandboxError:
        return SandboxError(
            f"the sandbox service at {self.url} cannot be reached or has gone away: {error or type(error).__name__}; is it "
            "running (perilune sandbox serve)?"
        )

    def request(
        self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> bytes:  # fmt: skip
        """One request; returns the answer's body.

        Raises:
            PeriluneError: what the service said, as the same typed error that it met; SandboxError if it is not there.
        """
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        connection = self._open()
        try:
            connection.request(method, target, data, self.headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise as_error(answer.status, content)
        return content

    def json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> Any:
        """The same for an answer in JSON; None for an empty one."""
        content = self.request(method, path, body, query)
        return json.loads(content) if content else None

    def stream(self, path: str, first: bytes = b"") -> Stream:
        """A POST whose body goes on while its answer comes; `first` is sent at once. Raises as `request`."""
        connection = self._open()
        try:
            connection.putrequest("POST", quote(path))
            for name, value in {**self.headers, "Transfer-Encoding": "chunked"}.items():
                connection.putheader(name, value)
            connection.endheaders()
            assert connection.sock is not None, "headers were sent"
            stream = Stream(self, connection, connection.sock)
            if first:
                stream.send(first)
            return stream
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._failed(error) from error


class Stream:
    """An open request; see `Connection.stream`."""

    def __init__(self, service: Connection, connection: http.client.HTTPConnection, sock: socket.socket) -> None:
        self._service, self._connection, self._sock = service, connection, sock
        self._answer: http.client.HTTPResponse | None = None
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """A piece of the request's body; b"" ends it. Raises OSError when the service has gone."""
        with self._sending:
            self._sock.sendall(b"%x\r\n" % len(data) + data + b"\r\n")

    def begin(self) -> http.client.HTTPResponse:
        """The head of the answer. Raises as `Connection.request`."""
        if self._answer is None:
            try:
                answer = self._connection.getresponse()
                if answer.status >= 300:
                    raise as_error(answer.status, answer.read())
            except (OSError, http.client.HTTPException) as error:
                raise self._service._failed(error) from error
            self._answer = answer
        return self._answer

    def events(self) -> Iterator[dict[str, Any]]:
        """Server-sent events. Raises the error that one of them tells, GuestLost if the service goes away in between."""
        answer = self.begin()
        try:
            while line := answer.readline():
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise rebuilt(event["error"]["type"], event["error"]["message"], event["error"].get("param"))
                    yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise GuestLost(
                f"the sandbox service at {self._service.url} went away while a command ran: {error}"
            ) from error

    def read(self) -> bytes:
        """The next bytes of the answer; b"" at its end."""
        return self.begin().read1(PIECE)

    def close(self) -> None:
        """Leave it; the service ends what it had started for it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._answer is not None:
            self._answer.close()
        self._connection.close()


def as_error(status: int, content: bytes) -> PeriluneError:
    """The typed error of an answer; one that is not ours is quoted."""
    try:
        error = json.loads(content)["error"]
        return rebuilt(str(error["type"]), str(error["message"]), error.get("param"))
    except (ValueError, KeyError, TypeError):
        return SandboxError(f"the sandbox service answered {status}: {content[:200].decode(errors='replace')}")


class Feeder:
    """Sends what a descriptor gives to a stream, in a thread, until its end or until it is told to stop."""

    def __init__(self, stream: Stream, source: int) -> None:
        self._stop, self._tell = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(stream, source), daemon=True)
        self._thread.start()

    def _run(self, stream: Stream, source: int) -> None:
        with contextlib.suppress(OSError):
            while self._stop not in select.select([source, self._stop], [], [])[0]:
                data = os.read(source, PIECE)
                stream.send(data)
                if not data:
                    return

    def end(self) -> None:
        """Stop it and wait for it."""
        os.close(self._tell)
        self._thread.join(CALL_SECONDS)
        os.close(self._stop)
