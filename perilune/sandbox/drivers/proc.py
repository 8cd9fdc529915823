"""The `proc` driver: processes in their own namespaces on the host's kernel, files as overlays in a size-limited tmpfs.

A fork server (`guest/zygote.py`) makes each sandbox in a few milliseconds. Snapshots hold files: processes are in none, and a
resumed sandbox starts without any. Works for root and, where user namespaces are allowed, for any user.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from perilune.sandbox import template
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.fork_server import ForkServer
from perilune.sandbox.drivers.proc_machine import CALL_SECONDS, ProcMachine, remove_scratch
from perilune.sandbox.guest import wire
from perilune.sandbox.protocol import Capabilities, DriverUnavailable, Probe, Spec

INODES = 200_000
CAPABILITIES = Capabilities(
    isolation="namespaces", snapshot="files", incremental=True, fork=True, guest_kernel=False, network=("none", "host"),
    mounts=False,
)  # fmt: skip


class ProcDriver:
    """Makes `proc` sandboxes.

    Args:
        folder: where it keeps its templates and the mount point; sandboxes of one folder share them.
    """

    name = "proc"
    contains = "files"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = ForkServer("perilune.sandbox.guest.zygote", CALL_SECONDS)
        self._lock = threading.Lock()

    def probe(self) -> Probe:
        """Make a sandbox, run programs in it, save it, run programs in the restored one; says what of it failed."""
        from perilune.sandbox.drivers.probing import examine

        return examine(self, CAPABILITIES)

    def template_hash(self, spec: Spec) -> str:
        """Identity of what a sandbox starts from."""
        return template.template_hash(spec, self.folder / "templates")

    def _ask(self, request: dict[str, Any], control: socket.socket) -> None:
        with self._lock:
            wire.send(self._server.socket(), request, [control.fileno()])

    def make(self, sandbox: str, generation: str, spec: Spec, layer: str | None, blobs: str) -> ProcMachine:
        """Start a guest.

        Args:
            sandbox, generation: its names; the agent must answer with this generation.
            layer: blob of the changed files to start from, or None.
            blobs: the store's blob folder.

        Raises:
            DriverUnavailable: the kernel refused a namespace or a mount (which one is said).
            SandboxError: a stored blob is damaged.
        """
        if sys.platform != "linux":
            raise DriverUnavailable(
                f"proc needs Linux; this is {sys.platform}. In a Linux virtual machine or container it works"
            )
        base = self.folder / "mount"
        base.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / "scratch" / f"{sandbox}-{generation[:8]}"
        scratch.mkdir(parents=True)
        group = Group(f"perilune-{sandbox}-{generation[:8]}", spec.limits)
        limits = spec.limits
        rlimits = {
            "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NPROC": limits.processes,
        }  # fmt: skip
        if "memory" in group.missing:
            rlimits["RLIMIT_AS"] = limits.memory_bytes
        mine, its = wire.pair()
        mine.settimeout(CALL_SECONDS)
        try:
            request = {
                "generation": generation, "hostname": sandbox[:63], "base": str(base), "network": spec.network,
                "trees": template.trees(spec, self.folder / "templates"), "disk_bytes": limits.disk_bytes, "inodes": INODES,
                "layer": layer, "blobs": blobs, "uid": os.geteuid(), "gid": os.getegid(), "rlimits": rlimits,
                "cgroup_procs": group.procs_files, "changes": spec.changes, "scratch": str(scratch),
            }  # fmt: skip
            self._ask(request, its)
            its.close()
            return ProcMachine(sandbox, mine, generation, group, spec, scratch)
        except BaseException as error:
            its.close()
            mine.close()
            group.remove()
            remove_scratch(scratch)
            if isinstance(error, (OSError, wire.Malformed)):
                raise DriverUnavailable(f"proc: the fork server does not answer: {error}") from error
            raise

    def close(self) -> None:
        """End the fork server; machines that still live end with it."""
        with self._lock:
            self._server.close()
