"""A live Firecracker guest: its process, its agent over vsock, its state as pages of a store."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.agent_machine import AgentMachine
from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.drivers.firecracker_api import SOCKET, Api
from perilune.sandbox.drivers.guarantees import machine_guarantees
from perilune.sandbox.drivers.keeper import Keeper, Started
from perilune.sandbox.guest.build_image import Image
from perilune.sandbox.page_names import PAGE, Pages
from perilune.sandbox.page_writer import Writer
from perilune.sandbox.pages import EMPTY, Numbers, Table, overlaid
from perilune.sandbox.protocol import DriverUnavailable, GuestLost, Limits, Look, Saved, SecretInSnapshot, Spec
from perilune.sandbox.store import Batch, Store

FORMAT = 1
AGENT_PORT = 1024
BOOT_SECONDS = 30.0
PIECE = 16 << 20
KERNEL_LINE = "quiet console=ttyS0 reboot=k panic=1 init_on_free=1 random.trust_cpu=on perilune.vsock"
OVERHEAD_BYTES, OVERHEAD_THREADS = 64 << 20, 30
LIMITS = {"disk_bytes": 64 << 20, "processes": 256, "open_files": 1024}


@dataclass(frozen=True, slots=True)
class State:
    """A saved machine on this host's disk.

    Attributes:
        devices, memory: files, as Firecracker wrote them or as they were put together from a store.
        table: where the memory's pages lie in the store; None = in none.
    """

    devices: Path
    memory: Path
    table: Table | None


def read_state(store: Store, record: dict[str, Any], folder: Path) -> State:
    """Put a saved machine's files together. Raises StoreDamaged."""
    table = Table.decode(store.read(record["table"]), record["packs"])
    state = State(folder / "devices", folder / "memory", table)
    state.devices.write_bytes(store.read(record["devices"]))
    with open(state.memory, "wb") as file:
        file.truncate(record["size"])
        for number, pages in store.packs.pieces(table):
            for page, content in zip(number.tolist(), pages):
                os.pwrite(file.fileno(), content, page * PAGE)
    return state


def written_pages(file: Path, *, zeros: bool) -> tuple[Numbers, Pages]:
    """Pages of a memory file that are no holes: of a diff, those that were written since the last snapshot.

    Args:
        zeros: also pages of zeros, which in a diff replace what was there.
    """
    numbers, pieces = [np.zeros(0, np.uint32)], [np.zeros((0, PAGE), np.uint8)]
    with open(file, "rb") as memory:
        fd, size, at = memory.fileno(), os.fstat(memory.fileno()).st_size, 0
        while at < size:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA) // PAGE * PAGE
            except OSError:  # Only a hole is left.
                break
            end = min(size, -(-os.lseek(fd, at, os.SEEK_HOLE) // PAGE) * PAGE, at + PIECE)
            pages = np.frombuffer(os.pread(fd, end - at, at), np.uint8).reshape(-1, PAGE)
            number = np.arange(at // PAGE, end // PAGE, dtype=np.uint32)
            held = slice(None) if zeros else np.flatnonzero(pages.view(np.uint64).any(axis=1))
            numbers.append(number[held])
            pieces.append(pages[held])
            at = end
    return np.concatenate(numbers), np.concatenate(pieces)


def _spawn(keeper: Keeper, program: str, sandbox: str, folder: Path, groups: list[str]) -> tuple[Started, Api]:
    errors = os.memfd_create("firecracker")
    try:
        argv = [program, "--api-sock", SOCKET, "--id", "".join(letter for letter in sandbox if letter.isalnum())]
        started = keeper.start(argv, [], errors, groups, str(folder))
        api = Api(sandbox, folder)
        try:
            api.wait(started.alive)
        except GuestLost as error:
            started.end()
            said = os.pread(errors, 2000, 0).decode(errors="replace").strip()
            raise DriverUnavailable(f"firecracker: it does not start: {said or error}") from error
        return started, api
    finally:
        os.close(errors)


def boot(keeper: Keeper, program: str, image: Image, memory: int, folder: Path) -> None:
    """Boot a template and save it as `devices` and `memory` in the folder. Raises DriverUnavailable."""
    started, api = _spawn(keeper, program, "template", folder, [])
    channel = None
    try:
        api.boot(image.kernel, image.initrd, KERNEL_LINE, memory)
        channel = Channel("template", _connected(api, started))
        channel.hello("0" * 32, os.urandom(64), LIMITS, "template", BOOT_SECONDS)
        channel.quiesce(overwrite=True)
        api.pause()
        api.save(folder / "devices", folder / "memory", whole=True)
    except GuestLost as error:
        raise DriverUnavailable(f"firecracker: no guest answers: {error}") from error
    finally:
        if channel is not None:
            channel.close()
        started.end()
        for name in (SOCKET, "agent.sock"):
            (folder / name).unlink(missing_ok=True)


def _connected(api: Api, started: Started) -> Any:
    """The agent's socket, once the guest listens."""
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        try:
            return api.agent(AGENT_PORT)
        except GuestLost:
            if not started.alive() or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class FirecrackerMachine(AgentMachine):
    """A guest that runs.

    Args:
        keeper, program: start the process.
        sandbox, generation, spec: what it is.
        scratch: folder of its own, removed with it; the process runs there.
        state: what it goes on from.
        made_of: of its template.
    """

    def __init__(
        self,
        keeper: Keeper,
        program: str,
        sandbox: str,
        generation: str,
        spec: Spec,
        scratch: Path,
        state: State,
        made_of: str,
    ) -> None:
        self.sandbox, self.spec, self.scratch, self.made_of = sandbox, spec, scratch, made_of
        self._table = state.table
        self._size = state.memory.stat().st_size
        self._lock = threading.Lock()
        limits = Limits(memory_bytes=self._size + OVERHEAD_BYTES, processes=OVERHEAD_THREADS, cpus=spec.limits.cpus)
        self.group = Group(f"perilune-{sandbox}-{generation[:8]}", limits)
        self.guarantees = machine_guarantees(self.group, spec, "kvm", self._size)
        self.started: Started | None = None
        try:
            self.started, self.api = _spawn(
                keeper, program, sandbox, scratch, [str(path) for path in self.group.procs_files]
            )
            self.api.load(state.devices, state.memory)
            self._channel = Channel(sandbox, _connected(self.api, self.started))
            self._hello(generation)
        except BaseException:
            self.destroy()
            raise

    def freeze(self) -> int:
        """Have the guest stand still; returns how many processes it has."""
        return self._freeze(overwrite=False)

    def _freeze(self, overwrite: bool) -> int:
        processes = self.channel.quiesce(overwrite)
        try:
            self.api.pause()
        except BaseException:
            self.channel.resume()
            raise
        return processes

    def thaw(self) -> None:
        """Let it go on, with its clock set."""
        self.api.resume()
        self.channel.resume()

    def save(self, batch: Batch, look: Look) -> Saved:
        """Store devices and the pages that were written since the last time; the guest stands still (`freeze`).

        Raises:
            SecretInSnapshot: a secret is in its memory.
        """
        with self._lock:
            try:
                return self._save(batch, look)
            except SecretInSnapshot:
                self.thaw()
                self._freeze(overwrite=True)
                return self._save(batch, look)

    def _save(self, batch: Batch, look: Look) -> Saved:
        base, self._table = (
            self._table,
            None,
        )  # A diff that was taken and not stored is missing from the next one: that is whole then.
        if base is not None and not all(batch.store.blob_path(name).exists() for name in base.packs):
            base = None
        devices, memory = self.scratch / "devices.new", self.scratch / "memory.new"
        try:
            self.api.save(devices, memory, whole=base is None)
            number, pages = written_pages(memory, zeros=base is not None)
            packs = batch.store.packs
            under = base or EMPTY
            packs.learn(under.packs)
            table = overlaid(
                under, Writer(packs, batch, under, frozenset(under.packs)).write(number, pages, look, "its memory")
            )
            state = devices.read_bytes()
        finally:
            devices.unlink(missing_ok=True)
            memory.unlink(missing_ok=True)
        names = {"table": batch.put(table.encode()), "devices": batch.put(state)}
        record = {
            "format": FORMAT, "made_of": self.made_of, "size": self._size, **names, "packs": list(table.packs),
            "needs": sorted({*table.packs, *names.values()}),
        }  # fmt: skip
        self._table = table
        return Saved(batch.put(json.dumps(record).encode()), len(number), pages.nbytes + len(state))

    def pids(self) -> list[int]:
        """See `protocol.Machine`."""
        return [self.started.pid] if self.started is not None and self.alive() else []

    def alive(self) -> bool:
        """Whether the process runs; it ends with a panic of the guest's kernel."""
        return not self._ended and self.started is not None and self.started.alive()

    def destroy(self) -> None:
        """End it at once and free all of it."""
        if self._ended:
            return
        self._ended = True
        if self.started is not None:
            self.started.kill()
        if self._channel is not None:
            self._channel.close()
        if self.started is not None:
            self.started.end()
        self.group.remove()
        shutil.rmtree(self.scratch, ignore_errors=True)
