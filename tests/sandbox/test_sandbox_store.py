"""The snapshot store: damage is named, a killed writer costs nothing, what is shared stays, and the limit holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import CapacityError, ConfigError, SandboxError
from perilune.sandbox.guest import layer, linux
from perilune.sandbox.protocol import StoreDamaged, StoreFull
from perilune.sandbox.store import SYNCS, Snapshot, Store
from perilune.sandbox.store.batch import SMALL

TESTED_DRIVERS = ("proc",)


def publish(store: Store, *contents: bytes, name: str | None = None) -> Snapshot:
    """A snapshot with one file for each content."""
    with store.writing() as batch:
        entries = []
        for number, content in enumerate(contents):
            pieces = [content[at : at + layer.CHUNK] for at in range(0, len(content), layer.CHUNK)]
            chunks = [batch.put(piece) if piece.strip(b"\0") else None for piece in pieces]
            entries.append(
                {"path": f"f{number}", "type": "file", "mode": 0o644, "uid": 0, "gid": 0, "mtime": 0, "size": len(content),
                 "chunks": chunks}
            )  # fmt: skip
        snapshot = Snapshot(
            id=name or store.new_id(), sandbox="sb", generation="g", driver="proc", machine="m", contains="files", template_hash="t",
            spec={}, layer=batch.put(json.dumps(entries).encode()), parent=None, created=1.0, entries=len(entries), bytes=0,
            new_bytes=batch.new_bytes, processes=0,
        )  # fmt: skip
        batch.publish(snapshot)
    return snapshot


def blobs(store: Store) -> set[str]:
    return {path.parent.name + path.name for path in (store.root / "blobs").rglob("*") if path.is_file()}


@pytest.mark.parametrize("sync", SYNCS)
def test_what_is_published_is_read_back(tmp_path, sync):
    store = Store(tmp_path, sync=sync)
    snapshot = publish(store, b"one", b"x" * 200_000)
    again = Store(tmp_path)
    assert again.snapshot(snapshot.id) == snapshot and again.snapshots() == [snapshot.id] and again.verify() == []
    entries = again.read_layer(snapshot.layer)
    assert b"".join(again.read(name) for name in entries[1]["chunks"]) == b"x" * 200_000
    assert len(set(entries[1]["chunks"])) == 2
    sizes = [max(SMALL, path.stat().st_size) for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert store.used_bytes() == sum(sizes), "what was counted in advance is given back"


@pytest.mark.parametrize("sync, least", [("none", 0), ("batch", 2), ("full", 4)])
def test_syncs_happen_before_the_snapshot_exists(tmp_path, monkeypatch, sync, least):
    calls: list[str] = []
    fsync, rename, whole = os.fsync, os.rename, linux.sync_file_system
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("sync") or fsync(fd))
    monkeypatch.setattr(
        os, "rename", lambda a, b: calls.append("snap" if "snap-" in str(b) else "blob") or rename(a, b)
    )
    monkeypatch.setattr(linux, "sync_file_system", lambda fd: calls.append("whole") or whole(fd))
    publish(Store(tmp_path, sync=sync), b"one", b"two")
    before = calls[: calls.index("snap")]
    assert "blob" not in calls[len(before) :] and before.count("blob") == 3
    assert calls.count("sync") >= least and ("whole" in before[-2:]) == (sync == "batch")
    assert calls[-1] == ("snap" if sync == "none" else "sync")


@pytest.mark.parametrize(
    "damage, wanted",
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "corrupt"),
        (None, "missing"),
    ],
)
def test_a_damaged_blob_is_named(tmp_path, damage, wanted):
    store = Store(tmp_path)
    snapshot = publish(store, b"precious")
    name = layer.digest(b"precious")
    path = store.blob_path(name)
    path.unlink() if damage is None else path.write_bytes(damage(b"precious"))
    with pytest.raises(StoreDamaged, match=name):
        store.read(name)
    with pytest.raises(ValueError, match=wanted):
        layer.load(str(store.root / "blobs"), name, 8)
    assert len(store.verify()) == 1 and snapshot.id in store.verify()[0] and name in store.verify()[0]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_snapshot_that_is_deleted_while_the_store_is_verified_is_no_damage(tmp_path, monkeypatch, comes_back):
    store = Store(tmp_path / "store", sync="none")
    kept, deleted = publish(store, b"shared", b"kept"), publish(store, b"shared", b"deleted")
    record, content = store.export(deleted.id), {name: store.read(name) for name in store.needs(deleted)}
    read, at = Store.read, [0]

    def read_and_delete(self, name):
        """Before one of the reads somebody deletes the snapshot; after it, it may be fetched again."""
        at[0] -= 1
        now = at[0] == 0
        if now:
            Store(tmp_path / "store", sync="none").delete([deleted.id])
        try:
            return read(self, name)
        finally:
            if now and comes_back:
                Store(tmp_path / "store", sync="none").import_snapshot(record, content.__getitem__)

    monkeypatch.setattr(Store, "read", read_and_delete)
    for moment in range(1, 8):
        if not store.snapshot_path(deleted.id).exists():
            store.import_snapshot(record, content.__getitem__)
        at[0] = moment
        assert store.verify() == [], f"deleted before read {moment}"
        at[0] = 0
    assert kept.id in store.snapshots()
    store.blob_path(layer.digest(b"kept")).unlink()
    assert len(store.verify()) == 1, "real damage is still told"


@given(cut=st.integers(0, 2000), flip=st.integers(0, 2000))
def test_no_damaged_record_or_layer_is_taken_for_whole(tmp_path_factory, cut, flip):
    store = Store(tmp_path_factory.mktemp("store"), sync="none")
    snapshot = publish(store, b"a", b"b")
    for path in (store.snapshot_path(snapshot.id), store.blob_path(snapshot.layer)):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[flip % len(whole)] ^= 1 << (cut % 8)
        for damaged in (whole[: cut % len(whole)], bytes(flipped)):
            path.write_bytes(damaged)
            with pytest.raises(StoreDamaged, match=f"{snapshot.id}|{snapshot.layer}"):
                store.read_layer(store.snapshot(snapshot.id).layer)
            with pytest.raises(StoreDamaged):
                store.collect()
            assert store.blob_path(layer.digest(b"a")).exists(), "collected while what is needed was not known"
        path.write_bytes(whole)
    assert store.verify() == []


def test_collection_keeps_what_any_snapshot_needs(tmp_path):
    store = Store(tmp_path)
    first = publish(store, b"shared", b"first")
    second = publish(store, b"shared", b"second")
    assert store.references()[layer.digest(b"shared")] == 2
    store.delete([first.id])
    assert layer.digest(b"first") not in blobs(store) and layer.digest(b"shared") in blobs(store)
    assert store.verify() == []
    copy = store.copy(store.snapshot(second.id))
    store.delete([second.id])
    assert store.read(layer.digest(b"second")) == b"second"
    store.delete([copy.id])
    assert blobs(store) == set() and store.used_bytes() == 0


def test_deleting_an_unknown_snapshot_removes_nothing(tmp_path):
    store = Store(tmp_path)
    known = publish(store, b"a")
    with pytest.raises(SandboxError, match="snap-nothere"):
        store.delete([known.id, "snap-nothere"])
    assert store.snapshots() == [known.id]
    for name in ("../x", "snap-../x", "x", "snap-"):
        with pytest.raises(SandboxError, match="no snapshot's name"):
            store.snapshot(name)


def test_collection_waits_for_a_writer(tmp_path):
    store = Store(tmp_path)
    ended = threading.Event()
    with store.writing() as batch:
        batch.put(b"not yet named by anything")
        collector = threading.Thread(target=lambda: (Store(tmp_path).collect(), ended.set()))
        collector.start()
        collector.join(0.2)
        assert not ended.is_set() and len(blobs(store)) == 1
    collector.join(10)
    assert ended.is_set() and blobs(store) == set()


def test_the_limit_holds_over_several_writers_and_frees_with_collection(tmp_path):
    store, other = Store(tmp_path, max_bytes=10_000), Store(tmp_path, max_bytes=10_000)
    kept = publish(store, os.urandom(4000))
    with pytest.raises(StoreFull, match="may hold 10000") as full:
        publish(other, os.urandom(4000), os.urandom(4000))
    assert isinstance(full.value, CapacityError) and isinstance(full.value, SandboxError)
    assert store.snapshots() == [kept.id]
    store.collect()
    assert store.used_bytes() == 4000 + SMALL
    publish(other, os.urandom(4000))


def test_a_full_disk_is_a_typed_error_and_publishes_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreFull, match="No space left"):
        publish(store, b"a")
    monkeypatch.undo()
    assert store.snapshots() == [] and list((tmp_path / "tmp").iterdir()) == []


def test_settings_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="none, batch, full"):
        Store(tmp_path, sync="sometimes")


WRITER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_sandbox_store as t
from perilune.sandbox.store import Store
real = {{name: getattr(os, name) for name in ("rename", "write", "fsync", "open")}}
left = [int(sys.argv[2])]
def counting(name):
    def call(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*args, **options)
    return call
store = Store(Path(sys.argv[1]), sync="full")
for name in real:
    setattr(os, name, counting(name))
t.publish(store, b"old", b"new" * 30000, name="snap-second")
real["write"](1, b"done %d" % (int(sys.argv[2]) - left[0]))
"""


def test_a_writer_killed_at_any_point_leaves_the_old_snapshot_and_nothing_half(tmp_path, count):
    script = WRITER.format(tests=os.path.dirname(__file__))

    def write(point: int) -> tuple[Store, str, subprocess.CompletedProcess[bytes]]:
        root = tmp_path / str(point)
        first = publish(Store(root, sync="none"), b"old")
        run = subprocess.run([sys.executable, "-c", script, str(root), str(point)], capture_output=True, timeout=120)
        return Store(root), first.id, run

    store, first, run = write(1_000_000)
    calls = int(run.stdout.split()[1])
    assert calls > 20 and set(store.snapshots()) == {first, "snap-second"}
    rounds = min(calls, count(full=calls, reduced=5))
    for point in sorted({1 + number * calls // rounds for number in range(rounds)}):
        store, first, run = write(point)
        assert run.returncode == -9, run.stderr
        assert store.verify() == []
        assert set(store.snapshots()) in ({first}, {first, "snap-second"})
        store.collect()
        assert blobs(store) == set(store.references()) and list((store.root / "tmp").iterdir()) == []
        again = publish(store, b"new" * 30000)
        assert store.verify() == [] and again.id in store.snapshots()
