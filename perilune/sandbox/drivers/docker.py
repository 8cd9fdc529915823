"""The `docker` driver: containers of an engine through its API, with whatever runtime the engine has.

`Spec.template` is the name of an image that the engine has ("host": `IMAGE_VARIABLE`, else a small one that is made of this machine's
busybox); nothing is ever pulled. Snapshots hold changed files in the same form as those of `proc`. Another runtime (runsc, kata, nvidia) is
named by `RUNTIME_VARIABLE`, GPUs by `GPUS_VARIABLE`; the probe runs programs with just these settings.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError
from perilune.sandbox.drivers.docker_engine import Engine, EngineError, engine_socket
from perilune.sandbox.drivers.docker_machine import DockerMachine
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import Capabilities, DriverUnavailable, Guarantee, Probe, Spec, StoreDamaged

IMAGE_VARIABLE, RUNTIME_VARIABLE, GPUS_VARIABLE = (
    f"PERILUNE_SANDBOX_DOCKER_{name}" for name in ("IMAGE", "RUNTIME", "GPUS")
)
SMALL_IMAGE = "perilune-busybox:2"
KEPT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
SETTLED_SECONDS = 60.0
"""Age from which a container has a locked sandbox if anybody wants it."""
IDLE = ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
_SMALL_FILES = (
    ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"), ("etc/shells", b"/bin/sh\n"), ("etc/alternatives/none", b""),
)  # fmt: skip
CAPABILITIES = Capabilities(
    isolation="container", snapshot="files", incremental=True, fork=True, guest_kernel=False, network=("none", "host"),
    mounts=False,
)  # fmt: skip


class DockerDriver:
    """Makes containers.

    Args:
        folder: of this driver in the sandboxes' folder; the engine keeps the files, and what is made for this folder is labelled so.
    """

    name = "docker"
    contains = "files"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engine: Engine | None = None

    def engine(self) -> Engine:
        """The engine, asked once whether it answers. Raises DriverUnavailable."""
        if self._engine is None:
            engine = Engine(engine_socket())
            engine.json("GET", "/version")
            self._sweep(engine)
            self._engine = engine
        return self._engine

    def probe(self) -> Probe:
        """Make a container, run programs in it, save it, run programs in the restored one; says what of it failed."""
        from perilune.sandbox.drivers.probing import examine

        return examine(self, CAPABILITIES)

    def _image(self, spec: Spec) -> dict[str, Any]:
        name = spec.template if spec.template != "host" else os.environ.get(IMAGE_VARIABLE, SMALL_IMAGE)
        try:
            return self.engine().json("GET", f"/images/{name}/json")
        except EngineError as error:
            if error.status == 404 and name == SMALL_IMAGE:
                self._make_small_image()
                return self.engine().json("GET", f"/images/{name}/json")
            if error.status == 404:
                raise ConfigError(
                    f"docker: the engine has no image {name!r}; get it first (docker pull {name})"
                ) from None
            raise

    def _make_small_image(self) -> None:
        """An image of this machine's static busybox. Raises DriverUnavailable without one."""
        busybox = shutil.which("busybox")
        if busybox is None or b"statically linked" not in _kind(busybox):
            raise DriverUnavailable(
                f"docker: no image is named by {IMAGE_VARIABLE}, and this machine has no static busybox to make one of; "
                "install busybox-static, or name an image"
            )
        names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as file:
            for folder in ("bin", "etc", "etc/alternatives", "tmp", "root", "workspace", "dev", "proc", "sys", "mnt"):
                member = tarfile.TarInfo(folder)
                member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
                file.addfile(member)
            file.add(os.path.realpath(busybox), "bin/busybox")
            for name in names:
                if name != "busybox":
                    member = tarfile.TarInfo(f"bin/{name}")
                    member.type, member.linkname = tarfile.SYMTYPE, "busybox"
                    file.addfile(member)
            for name, text in _SMALL_FILES:
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(text), 0o644
                file.addfile(member, io.BytesIO(text))
        repository, tag = SMALL_IMAGE.split(":")
        query = {"fromSrc": "-", "repo": repository, "tag": tag}
        self.engine().call("POST", "/images/create", query=query, data=data.getvalue())

    def template_hash(self, spec: Spec) -> str:
        """The image's own hash."""
        return str(self._image(spec)["Id"])

    def make(self, sandbox: str, generation: str, spec: Spec, layer_name: str | None, blobs: str) -> DockerMachine:
        """Start a container.

        Raises:
            DriverUnavailable, ConfigError: there is no engine, or it has no such image.
            StoreDamaged: the layer is damaged.
        """
        engine, limits = self.engine(), spec.limits
        runtime, gpus = os.environ.get(RUNTIME_VARIABLE), os.environ.get(GPUS_VARIABLE)
        host: dict[str, Any] = {
            "Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes, "PidsLimit": limits.processes + 3,
            "NanoCpus": int(limits.cpus * 1e9), "NetworkMode": spec.network, "CapDrop": ["ALL"],
            "CapAdd": list(KEPT_CAPABILITIES), "SecurityOpt": ["no-new-privileges"],
            "Binds": [f"{Path(tree).resolve()}:{Path(tree).resolve()}:ro" for tree in spec.trees],
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in (("nofile", limits.open_files), ("fsize", limits.disk_bytes), ("core", 0))
            ],
        }  # fmt: skip
        if runtime:
            host["Runtime"] = runtime
        if gpus:
            if gpus != "all" and not gpus.isdecimal():
                raise ConfigError(f"docker: {GPUS_VARIABLE}={gpus!r} must be a number of GPUs, or all")
            host["DeviceRequests"] = [
                {"Driver": "nvidia", "Count": -1 if gpus == "all" else int(gpus), "Capabilities": [["gpu"]]}
            ]
        body = {
            "Image": self._image(spec)["Id"], "Entrypoint": IDLE, "Cmd": [], "Hostname": sandbox[:63], "User": "0:0",
            "Labels": {"perilune.sandbox": sandbox, "perilune.generation": generation, "perilune.home": str(self.folder.parent)}, "HostConfig": host,
        }  # fmt: skip
        container = engine.json("POST", "/containers/create", body, {"name": f"perilune-{sandbox}-{generation[:8]}"})[
            "Id"
        ]
        try:
            engine.call("POST", f"/containers/{container}/start")
            machine = DockerMachine(engine, sandbox, container, spec, self._guarantees(engine, spec, runtime, gpus))
            machine.prepare([] if layer_name is None else _entries(blobs, layer_name), blobs)
            return machine
        except BaseException:
            engine.call("DELETE", f"/containers/{container}", query={"force": 1, "v": 1})
            raise

    def _guarantees(self, engine: Engine, spec: Spec, runtime: str | None, gpus: str | None) -> tuple[Guarantee, ...]:
        version = engine.json("GET", "/version").get("Version", "?")
        limits, own_network = spec.limits, spec.network == "none"
        return (
            Guarantee("isolation", True, f"container of engine {version}, runtime {runtime or 'of its default'}"),
            Guarantee("guest kernel", False, "the host's kernel runs the guest, unless the runtime brings another"),
            Guarantee("unprivileged", False, "guest root is root outside but for its namespaces, capabilities and filter"),
            Guarantee("network", own_network, "own network namespace, loopback only" if own_network else "shares the host's network"),
            Guarantee("system calls", True, "the engine's default filter, no new privileges"),
            Guarantee("memory limit", True, f"{limits.memory_bytes} bytes: control group of the engine"),
            Guarantee("process limit", True, f"{limits.processes}: control group of the engine"),
            Guarantee("processor limit", True, f"{limits.cpus:g}: control group of the engine"),
            Guarantee("disk limit", False, f"{limits.disk_bytes} bytes for each changed file only; they are on the engine's disk"),
            Guarantee("no orphans", False, "a container outlives an owner that is killed; the folder's next owner removes it"),
            Guarantee("memory snapshot", False, "snapshots hold files, but for /dev/shm and the engine's own /etc/hosts, hostname and resolv.conf; no process is saved"),
            Guarantee("gpu", bool(gpus), f"{gpus} by the engine" if gpus else f"none; {GPUS_VARIABLE} asks for them"),
        )  # fmt: skip

    def _sweep(self, engine: Engine) -> None:
        """Remove containers of this folder whose owner was killed: their sandbox's lock is free."""
        label = [f"perilune.home={self.folder.parent}"]
        for one in engine.json("GET", "/containers/json", query={"all": 1, "filters": json.dumps({"label": label})}):
            name = str(one["Labels"].get("perilune.sandbox", ""))
            young = time.time() - float(one.get("Created", 0)) < SETTLED_SECONDS
            if not (young or _is_locked(self.folder.parent / "sandboxes" / f"{name}.lock")):
                engine.call("DELETE", f"/containers/{one['Id']}", query={"force": 1, "v": 1})

    def close(self) -> None:
        """Nothing is kept open."""


def _entries(blobs: str, name: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(layer.load(blobs, name))
        for entry in entries:
            layer.check(entry)
        return entries
    except ValueError as error:
        raise StoreDamaged(f"a sandbox cannot be restored: {error}") from None


def _is_locked(path: Path) -> bool:
    """Whether some process holds this lock; a file that is not there is held by nobody."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _kind(path: str) -> bytes:
    """What kind of program this is, as far as it matters: an ELF file without an interpreter is statically linked."""
    with open(path, "rb") as file:
        return b"dynamic" if b"/ld-linux" in file.read(1 << 16) else b"statically linked"
