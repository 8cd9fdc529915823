"""Machines that run before their snapshot has arrived: right in every byte, whole afterwards, lost with a reason where a piece is nowhere."""

from __future__ import annotations

import os
import threading

import pytest

from perilune.errors import SandboxError
from perilune.sandbox import Sandbox, Sandboxes
from perilune.sandbox.arrival import Arrival
from perilune.sandbox.drivers import qemu
from perilune.sandbox.drivers.qemu_arriving import ArrivingMachine
from perilune.sandbox.fleet.transfer import arrive
from perilune.sandbox.protocol import StoreDamaged
from perilune.sandbox.store import Store

TESTED_DRIVERS = ("qemu",)
KEEPER = "mkfifo /tmp/ask /tmp/answer; (exec 3<>/tmp/ask 4<>/tmp/answer; v=kept; while read -r x <&3; do echo $v >&4; done) > /dev/null 2>&1 &"
ASK = "echo x > /tmp/ask; read -r v < /tmp/answer; echo $v"


class StorePeer:
    """A store of this process as a peer that ends after some answers; what comes unasked waits a moment for the first that is waited for."""

    def __init__(self, store: Store, answers: int = 1 << 30) -> None:
        self.store, self.left = store, answers
        self.touched = threading.Event()

    def record(self, snapshot: str) -> bytes:
        return self.store.export(snapshot)

    def blob(self, name: str) -> bytes:
        if threading.current_thread().name.startswith("faults of"):
            self.touched.set()
        elif self.store.blob_path(name).stat().st_size > 1 << 19:
            self.touched.wait(1.0)
        self.left -= 1
        if self.left < 0:
            raise SandboxError("the peer has ended")
        return self.store.read(name)


def sh(box: Sandbox, script: str) -> str:
    result = box.exec(["sh", "-c", script], timeout=60)
    assert result.code == 0, result
    return result.stdout.decode().strip()


@pytest.fixture
def source(sandboxes: Sandboxes, box: Sandbox) -> tuple[Store, str, str]:
    """A store with a snapshot, and the hash of a file in it; a process in it holds a word."""
    box.write_file("/workspace/big", os.urandom(3_000_000))
    box.write_file("/workspace/gone", os.urandom(500_000))
    box.checkpoint()
    sh(box, "rm /workspace/gone")
    sh(box, KEEPER)
    return sandboxes.home.store, box.checkpoint().id, sh(box, "sha256sum /workspace/big")


def arrived(there: Sandboxes, snapshot: str) -> Sandbox:
    box = there.resume(snapshot)
    if not isinstance(box._machine, ArrivingMachine):
        pytest.skip("this process may not fill another one's memory, or the kernel does not track it")
    return box


def test_it_runs_before_it_has_arrived_and_is_whole_afterwards(driver, source, tmp_path):
    store, snapshot, wanted = source
    with Sandboxes(tmp_path / "there", sync="none") as there:
        # The first of two peers ends in the middle.
        arrival = arrive(there.home.store, snapshot, [StorePeer(store, 12), StorePeer(store)])
        box = arrived(there, snapshot)
        assert isinstance(box._machine, ArrivingMachine) and box._machine._lazy is not None
        assert sh(box, ASK) == "kept" and box._machine._lazy.faulted > 0
        twin = there.resume(snapshot)
        assert sh(box, "sha256sum /workspace/big") == wanted == sh(twin, "sha256sum /workspace/big")
        arrival.wait()
        assert there.home.store.missing(snapshot) == set() and there.home.store.verify() == []
        # It is saved like any other, as what differs from its template, and so is a copy of it.
        box.write_file("/workspace/more", b"more")
        box.write_file("/workspace/big", b"small now")
        saved = box.checkpoint()
        assert saved.new_bytes < 3_000_000
        fork = box.fork(1)[0]
        assert not isinstance(fork._machine, ArrivingMachine) and sh(fork, ASK) == "kept" == sh(twin, ASK)
        assert fork.read_file("/workspace/more") == b"more" and fork.read_file("/workspace/big") == b"small now"
    assert Arrival.of(tmp_path / "there/store", snapshot=snapshot) is None


def test_a_peer_that_ends_in_the_middle_loses_the_machine_with_a_reason_and_nothing_else(driver, source, tmp_path):
    store, snapshot, wanted = source
    with Sandboxes(tmp_path / "there", sync="none") as there:
        arrive(there.home.store, snapshot, [StorePeer(store, 12)])
        with pytest.raises(SandboxError, match="is with none of 1 peers: the peer has ended|guest has ended|QEMU"):
            box = arrived(there, snapshot)
            while True:  # It runs on while what it touches is here, and is saved by no means.
                sh(box, ASK)
                box.checkpoint()
        assert there.home.store.snapshots() == [] and there.home.store.verify() == []
        with pytest.raises(SandboxError, match="there is no snapshot"):
            there.resume(snapshot)
        # What had come is not fetched again; the rest comes from another one.
        second = arrive(there.home.store, snapshot, [StorePeer(store)])
        assert sh(there.resume(snapshot), "sha256sum /workspace/big") == wanted
        second.wait()
        assert there.home.store.verify() == [] and there.home.store.snapshots() == [snapshot]
    with Sandboxes(tmp_path / "there", sync="none") as there:
        assert sh(there.resume(snapshot), ASK) == "kept"


def test_without_the_means_it_waits_until_all_of_it_is_here(driver, source, tmp_path, monkeypatch):
    store, snapshot, wanted = source
    monkeypatch.setattr(qemu, "tracking_library", lambda: None)
    with Sandboxes(tmp_path / "there", sync="none") as there:
        peer = StorePeer(store)
        peer.touched.set()
        arrive(there.home.store, snapshot, [peer])
        box = there.resume(snapshot)
        assert not isinstance(box._machine, ArrivingMachine) and there.home.store.missing(snapshot) == set()
        assert sh(box, "sha256sum /workspace/big") == wanted


def test_a_piece_that_is_not_what_its_name_says_is_no_piece(driver, source, tmp_path):
    store, snapshot, _ = source
    target = Store(tmp_path / "target", sync="none")
    with pytest.raises(StoreDamaged, match="another hash"):
        Arrival.begin(target, store.export(snapshot), lambda name: store.read(name)[:-1] + b"?")
    assert target.snapshots() == [] and Arrival.of(target.root, snapshot=snapshot) is None
    assert target.collect() >= 0, "nothing holds the store's lock"
