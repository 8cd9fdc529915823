"""The same sandboxes behind a service (`perilune sandbox serve`): the calls of `Sandboxes` and `Sandbox`, in another process.

with RemoteSandboxes("http://127.0.0.1:8010", key="…") as sandboxes:
    box = sandboxes.create()
    box.exec(["sh", "-c", "echo hello"])

`AsyncSandboxes(over=RemoteSandboxes(…))` has them for an event loop. Sandboxes belong to the service: they go on when this client ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.config.parse import from_dict, to_dict
from perilune.errors import ConfigError, PeriluneError
from perilune.sandbox.connection import Connection
from perilune.sandbox.guest_calls import check_argv, check_bytes
from perilune.sandbox.protocol import (
    Capabilities,
    DriverUnavailable,
    Guarantee,
    GuestFile,
    GuestFileError,
    NoSuchSandbox,
    OnOutput,
    Probe,
    Result,
    Spec,
    State,
)
from perilune.sandbox.remote_execution import RemoteExecution, RemoteTerminal, from_service, to_service
from perilune.sandbox.store import Snapshot


class RemoteSandboxes:
    """All sandboxes of a service.

    Args:
        url: where it listens.
        key: its bearer key; None = $PERILUNE_SANDBOX_KEY, if set.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.connection = Connection(url, key if key is not None else os.environ.get("PERILUNE_SANDBOX_KEY"))

    def __enter__(self) -> RemoteSandboxes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is kept open; the sandboxes go on."""

    def create(
        self, spec: Spec | None = None, *, driver: str = "proc", name: str | None = None,
        lifetime_seconds: float | None = None, idle_seconds: float | None = None,
    ) -> RemoteSandbox:  # fmt: skip
        """See `Pool.create`."""
        body = {
            "driver": driver, "spec": None if spec is None else to_dict(spec), "name": name,
            "lifetime_seconds": lifetime_seconds, "idle_seconds": idle_seconds,
        }  # fmt: skip
        return self._made(self.connection.json("POST", "/v1/sandboxes", body))

    def resume(self, snapshot: str, *, name: str | None = None) -> RemoteSandbox:
        """A new sandbox from a snapshot. See `Sandboxes.resume`."""
        return self._made(self.connection.json("POST", "/v1/sandboxes", {"snapshot": snapshot, "name": name}))

    def open(self, name: str) -> RemoteSandbox:
        """A sandbox of the service by name or id, in whatever state. Raises NoSuchSandbox; GuestLost for a lost one."""
        return self._made(self.connection.json("GET", f"/v1/sandboxes/{name}"))

    def _made(self, body: dict[str, Any]) -> RemoteSandbox:
        return RemoteSandbox(self.connection, body)

    def probe(self, name: str) -> Probe:
        """What a driver's probe found on the service's machine."""
        for probe in self.probes():
            if probe.driver == name:
                return probe
        raise ConfigError(f"the service at {self.connection.url} has no driver {name!r}")

    def probes(self) -> list[Probe]:
        """What each driver's probe found there."""
        return [_probe(values) for values in self.connection.json("GET", "/v1/drivers")["drivers"]]

    def records(self) -> list[dict[str, Any]]:
        """See `Pool.records`."""
        return self.connection.json("GET", "/v1/sandboxes")["sandboxes"]

    def saved(self) -> list[dict[str, Any]]:
        """See `Sandboxes.saved`."""
        return self.connection.json("GET", "/v1/snapshots")["snapshots"]

    def usage(self) -> dict[str, Any]:
        """`pool.Usage` as a JSON object."""
        return self.connection.json("GET", "/v1/usage")

    def remove(self, names: Sequence[str]) -> int:
        """Destroy sandboxes and delete snapshots, by name or id; returns the bytes that the store got back.

        Raises:
            NoSuchSandbox: one of the names is none; nothing was removed.
            SandboxError: a paused sandbox needs one of the snapshots.
        """
        names = list(dict.fromkeys(names))
        known = {row[key] for row in self.records() for key in ("name", "id")} | {row["id"] for row in self.saved()}
        for name in names:
            if name not in known:
                raise NoSuchSandbox(
                    f"there is no sandbox or snapshot {name!r} at {self.connection.url}; nothing was removed"
                )
        freed = 0
        # Snapshots last: a paused sandbox that goes as well needs its own no more.
        for name in sorted(names, key=lambda name: name.startswith("snap-")):
            if name.startswith("snap-"):
                freed += self.connection.json("DELETE", f"/v1/snapshots/{name}")["freed_bytes"]
            else:
                self.connection.request("DELETE", f"/v1/sandboxes/{name}")
        return freed


def _probe(values: dict[str, Any]) -> Probe:
    capabilities = values["capabilities"]
    if capabilities is not None:
        capabilities = Capabilities(**{**capabilities, "network": tuple(capabilities["network"])})
    guarantees = tuple(Guarantee(**one) for one in values["guarantees"])
    return Probe(**{**values, "capabilities": capabilities, "guarantees": guarantees})


class RemoteSandbox:
    """One sandbox of a service; the calls of `client.Sandbox`.

    Attributes:
        id, name, driver, spec: as there.
        state, generation, snapshot: as of the last answer; `refresh` asks again.
    """

    def __init__(self, connection: Connection, body: dict[str, Any]) -> None:
        self.connection = connection
        self.id, self.name, self.driver = body["id"], body["name"], body["driver"]
        self.spec = from_dict(Spec, body["spec"])
        self.state, self.generation, self.snapshot = State(body["state"]), body["generation"], body["snapshot"]

    def __repr__(self) -> str:
        return f"RemoteSandbox({self.name!r}, {self.driver}, {self.state.value}, {self.connection.url})"

    def _path(self, rest: str = "") -> str:
        return f"/v1/sandboxes/{self.id}{rest}"

    def _take(self, body: dict[str, Any]) -> None:
        self.state, self.generation, self.snapshot = State(body["state"]), body["generation"], body["snapshot"]

    def refresh(self) -> None:
        """Ask for its state again."""
        self._take(self.connection.json("GET", self._path()))

    def capabilities(self) -> Capabilities:
        """See `Sandbox.capabilities`."""
        probe = RemoteSandboxes(self.connection.url)
        probe.connection = self.connection
        found = probe.probe(self.driver)
        if found.capabilities is None:
            raise DriverUnavailable(f"{found.driver}: {found.reason}")
        return found.capabilities

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | int = b"",
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
    ) -> RemoteExecution:
        """See `Sandbox.start`."""
        check_argv(argv)
        if not isinstance(stdin, int):
            check_bytes("stdin", stdin)
        return RemoteExecution(self, self._header(argv, timeout, env, secrets, cwd), stdin)

    def _header(
        self, argv: Sequence[str], timeout: float | None, env: Mapping[str, str] | None, secrets: Mapping[str, str] | None, cwd: str
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "argv": list(argv), "timeout": timeout, "env": dict(env or {}), "secrets": dict(secrets or {}), "cwd": cwd,
            "stream": True,
        }  # fmt: skip

    def exec(self, argv: Sequence[str], *, on_output: OnOutput | None = None, **options: Any) -> Result:
        """See `Sandbox.exec`."""
        with self.start(argv, **options) as execution:
            for output in execution:
                if on_output is not None:
                    on_output(output)
            return execution.result()

    def terminal(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        size: tuple[int, int] = (24, 80),
    ) -> RemoteTerminal:
        """See `Sandbox.terminal`."""
        check_argv(argv)
        header = self._header(argv, None, env, secrets, cwd) | {"terminal": True, "rows": size[0], "columns": size[1]}
        return RemoteTerminal(self, header)

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See `Sandbox.read_file`; the service has a limit of its own, too."""
        data = self.connection.request("GET", self._path("/files"), query={"path": path})
        if len(data) > max_bytes:
            raise GuestFileError(
                f"sandbox {self.id}: read {path}: {len(data)} bytes, more than the {max_bytes} asked for"
            )
        return data

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Sandbox.write_file`."""
        check_bytes("a file's content", data)
        self.connection.request("PUT", self._path("/files"), data, {"path": path, "mode": f"{mode:o}"})

    def list(self, path: str) -> list[GuestFile]:
        """See `Sandbox.list`."""
        entries = self.connection.json("GET", self._path("/folder"), query={"path": path})["entries"]
        return [GuestFile(**entry) for entry in entries]

    def ports(self) -> list[int]:
        """See `Sandbox.ports`."""
        return self.connection.json("GET", self._path("/ports"))["ports"]

    def connect(self, port: int) -> socket.socket:
        """See `Sandbox.connect`: a socket whose bytes go through the service."""
        stream = self.connection.stream(self._path(f"/tunnel/{port}"))
        try:
            stream.begin()
        except PeriluneError:
            stream.close()
            raise
        mine, its = socket.socketpair()
        for pump in (to_service, from_service):
            threading.Thread(target=pump, args=(its, stream), daemon=True).start()
        return mine

    def checkpoint(self) -> Snapshot:
        """See `Sandbox.checkpoint`."""
        snapshot = Snapshot(**self.connection.json("POST", self._path("/checkpoint")))
        self.snapshot = snapshot.id
        return snapshot

    def fork(self, count: int = 1, *, name: str | None = None) -> Sequence[RemoteSandbox]:
        """See `Sandbox.fork`."""
        made = self.connection.json("POST", self._path("/fork"), {"count": count, "name": name})["sandboxes"]
        return [RemoteSandbox(self.connection, body) for body in made]

    def pause(self, *, keep_memory: bool = False) -> Snapshot | None:
        """See `Sandbox.pause`."""
        saved = self.connection.json("POST", self._path("/pause"), {"keep_memory": keep_memory})["snapshot"]
        self.state = State.PAUSED
        if saved is None:
            return None
        self.snapshot = saved["id"]
        return Snapshot(**saved)

    def resume(self) -> None:
        """See `Sandbox.resume`."""
        self._take(self.connection.json("POST", self._path("/resume")))

    def destroy(self) -> None:
        """See `Sandbox.destroy`."""
        with contextlib.suppress(NoSuchSandbox):
            self.connection.request("DELETE", self._path())
        self.state = State.DEAD
