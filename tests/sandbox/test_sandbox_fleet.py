"""Snapshots between stores by hash; and a fleet of three Ray nodes on this machine: sticky, migrating, losing a node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.errors import CapacityError, ConfigError, SandboxError
from perilune.sandbox import Limits, Sandboxes, Spec, State
from perilune.sandbox.fleet import Fleet, HttpPeer, pull
from perilune.sandbox.fleet.actors import NodeGone, node_names
from perilune.sandbox.fleet.node import Node, answered, value_of
from perilune.sandbox.home import Home
from perilune.sandbox.pool import Pool, PoolLimits
from perilune.sandbox.protocol import GuestLost, Mismatch, NoSuchSandbox, StoreDamaged, TransitionError
from perilune.sandbox.store import Store

TESTED_DRIVERS = ("proc",)
SPEC = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32, exec_seconds=60))


LIMITS = PoolLimits(tick_seconds=1.0, wait_seconds=0.0, sandboxes=3, park_seconds=1e6, memory_bytes=4 << 30)


class StorePeer:
    """A store of this process as a peer, counting, and lying where it is told to."""

    def __init__(self, store: Store, lies: bool = False) -> None:
        self.store, self.lies, self.asked = store, lies, 0

    def record(self, snapshot: str) -> bytes:
        return self.store.export(snapshot)

    def blob(self, name: str) -> bytes:
        self.asked += 1
        data = self.store.read(name)
        return data[:-1] + bytes([data[-1] ^ 1]) if self.lies else data


@pytest.fixture
def source(sandboxes, driver) -> tuple[Store, str]:
    box = sandboxes.create(SPEC, driver=driver)
    box.write_file("/workspace/big", os.urandom(300_000))
    box.write_file("/workspace/same", b"x" * 65536)
    return sandboxes.home.store, box.checkpoint().id


def test_only_what_is_missing_is_fetched(source, tmp_path):
    store, snapshot = source
    target, peer = Store(tmp_path / "target", sync="none"), StorePeer(store)
    first = pull(target, snapshot, [peer])
    assert first.blobs == peer.asked > 5 and first.bytes > 300_000 and target.verify() == []
    assert pull(target, snapshot, [peer]).blobs == 0
    blob = next(path for path in (target.root / "blobs").glob("*/*"))
    blob.unlink()
    assert pull(target, snapshot, [peer]).blobs == 1 and target.verify() == []


def test_a_peer_that_lies_is_not_believed(source, tmp_path):
    store, snapshot = source
    target, liar = Store(tmp_path / "target", sync="none"), StorePeer(store, lies=True)
    with pytest.raises(SandboxError, match="another hash"):
        pull(target, snapshot, [liar])
    assert target.snapshots() == []
    pulled = pull(target, snapshot, [liar, StorePeer(store)])
    assert pulled.refused > 0 and target.verify() == []
    record = store.export(snapshot).replace(b'"proc"', b'"qemu"')
    with pytest.raises(StoreDamaged, match="checksum"):
        target.import_snapshot(record, store.read)
    with pytest.raises(NoSuchSandbox, match="with none of 1 peers"):
        pull(Store(tmp_path / "third", sync="none"), "snap-0123456789abcdef", [StorePeer(store)])


def test_a_service_is_a_peer(source, sandboxes, home, tmp_path, driver):
    api = pytest.importorskip("perilune.sandbox.api", reason="the extra 'serve' is not installed")
    _, snapshot = source
    with (
        Pool(Sandboxes(home, sync="none"), PoolLimits(tick_seconds=3600)) as pool,
        api.serve_in_thread(pool, api_keys=("k",)) as served,
    ):
        with Sandboxes(tmp_path / "there", sync="none") as there:
            assert pull(there.home.store, snapshot, [HttpPeer(served.url, "k")]).blobs > 5
            assert there.resume(snapshot).read_file("/workspace/same") == b"x" * 65536
        with pytest.raises(NoSuchSandbox):
            pull(Store(tmp_path / "third", sync="none"), "snap-0123456789abcdef", [HttpPeer(served.url, "k")])


def test_a_node_answers_with_data_and_typed_errors(driver, tmp_path):
    node = Node("here", str(tmp_path), {"tick_seconds": 3600.0}, "none")
    try:
        made = value_of(node.create({}, driver, "a"))
        assert made["node"] == "here" and node.about()["held"] == 1
        value_of(node.call("a", "pause", (), {}))
        with pytest.raises(TransitionError, match="paused"):
            value_of(node.call("a", "exec", (["true"],), {}))
        with pytest.raises(NoSuchSandbox):
            value_of(node.show("b"))
        assert "error" in next(iter(node.outputs("b", ["true"], {})))
    finally:
        node.close()
    with pytest.raises(Mismatch) as caught:
        value_of(answered(_refuse)())
    assert caught.value.field == "weights"


def _refuse() -> None:
    raise Mismatch("weights", 1, 2, "step 3")


def test_names_of_nodes_last_where_they_can():
    nodes = [{"NodeID": "a" * 40, "NodeManagerAddress": "10.0.0.1"}, {"NodeID": "b" * 40, "NodeManagerAddress": "10.0.0.2"},
             {"NodeID": "c" * 40, "NodeManagerAddress": "10.0.0.2"}, {"NodeID": "d" * 40, "NodeManagerAddress": "x", "NodeName": "big"}]  # fmt: skip
    names = node_names(nodes)
    assert [names[letter * 40] for letter in "abcd"] == ["10.0.0.1", "10.0.0.2-bbbbbbbb", "10.0.0.2-cccccccc", "big"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "node_name": "n0"})
    try:
        for number in (1, 2):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20, node_name=f"n{number}")
        cluster.wait_for_nodes(60)
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def fleet(cluster, driver, tmp_path) -> Iterator[Fleet]:
    with Fleet(tmp_path, address=cluster, limits=LIMITS, copies=2, sync="none") as made:
        yield made


@pytest.mark.timeout(300)
def test_a_fleet(fleet, cluster, driver, tmp_path):
    """One test, for a cluster takes its time to start: spread, stick, migrate, lose a machine, go on from the copies, end, begin again."""
    assert sorted(fleet.nodes) == ["n0", "n1", "n2"]
    boxes = [fleet.create(SPEC, driver=driver, name=f"b{number}") for number in range(3)]
    assert {box.node for box in boxes} == {"n0", "n1", "n2"}, "the emptiest machine is next"
    outputs: list = []
    result = boxes[0].exec(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in", on_output=outputs.append)
    assert (result.code, result.stdout, result.stderr, len(outputs)) == (3, b"in", b"err\n", 2)
    assert boxes[1].exec(["cat"], stdin=b"whole").stdout == b"whole"
    boxes[0].write_file("/workspace/a", b"kept")
    assert boxes[0].read_file("/workspace/a") == b"kept" and [entry.name for entry in boxes[0].list("/workspace")] == [
        "a"
    ]
    with pytest.raises(SandboxError, match="No such file"):
        boxes[0].read_file("/workspace/b")
    with pytest.raises(ConfigError, match="is not one of"):
        fleet.create(SPEC, driver="teleport")
    assert fleet.open("b1").node == boxes[1].node
    with pytest.raises(NoSuchSandbox):
        fleet.open("nobody")

    snapshot = boxes[0].checkpoint()
    holders = fleet.holders(snapshot.id)
    assert len(holders) == 2 and boxes[0].node in holders, "a second machine has it"
    again = fleet.resume(snapshot.id)
    assert again.node in holders and again.read_file("/workspace/a") == b"kept", "where it lies, nothing is fetched"
    fork = boxes[0].fork(1)[0]
    assert fork.node == boxes[0].node

    # The machines that have the snapshot are full: the third one fetches it.
    third = next(name for name in fleet.nodes if name not in holders)
    with pytest.raises(CapacityError, match="no machine of the fleet has room"):
        while True:
            fleet.create(SPEC, driver=driver)
    next(box for box in boxes if box.node == third).destroy()
    moved = fleet.resume(snapshot.id)
    assert moved.node == third and moved.read_file("/workspace/a") == b"kept" and third in fleet.holders(snapshot.id)

    # A machine ends without a word.
    saved = boxes[0].pause()
    assert saved is not None and boxes[0].state is State.PAUSED
    gone = boxes[0].node
    pid = next(about["pid"] for about in fleet.about() if about["name"] == gone)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while gone in fleet.nodes and time.monotonic() < deadline:
        fleet.about()
    with pytest.raises(NodeGone, match=f"{gone} has left the fleet"):
        boxes[0].resume()
    with pytest.raises(GuestLost):
        fork.exec(["true"])
    moved.destroy()
    back = fleet.resume(saved.id)
    assert back.node != gone and back.read_file("/workspace/a") == b"kept"
    assert len(fleet.protect(saved.id)) == 2, "and there are two copies again"
    Home(tmp_path / gone).reap()

    # The fleet ends, and the next one on the same folder goes on; more copies than machines are refused.
    fleet.close()
    with pytest.raises(ConfigError, match="copies=9 must be 1 to 3"):
        Fleet(tmp_path, address=cluster, copies=9)
    with Fleet(tmp_path, address=cluster, limits=replace(LIMITS, idle_seconds=7.0), sync="none") as next_one:
        assert next_one.open(back.id).read_file("/workspace/a") == b"kept"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_is_not_there_is_told_at_once(address, tmp_path):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    with pytest.raises(ConfigError, match=f"no Ray cluster at address='{address}'.*ray start --head"):
        Fleet(tmp_path, address=address)


def test_a_fleet_without_ray_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install perilune\[ray\]"):
        Fleet(Path("/nowhere"))
