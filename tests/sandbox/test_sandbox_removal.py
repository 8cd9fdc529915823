"""Removing by name: all or nothing, nothing that another one needs; and records that can no longer be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perilune.errors import SandboxError
from perilune.sandbox import Limits, RemoteSandboxes, Sandbox, Sandboxes, Spec, TrajectoryLog
from perilune.sandbox.manifest import Versions
from perilune.sandbox.pool import Pool, PoolLimits
from perilune.sandbox.protocol import NoSuchSandbox, StoreDamaged
from perilune.sandbox.removal import steps, trajectories

TESTED_DRIVERS = ("proc",)
SPEC = Spec(limits=Limits(memory_bytes=96 << 20, disk_bytes=16 << 20))
VERSIONS = Versions(weights="w", quantisation="q", template="t", harness="h")


def kept(sandboxes: Sandboxes, driver: str, name: str) -> Sandbox:
    box = sandboxes.create(SPEC, driver=driver, name=name)
    box.write_file("/workspace/n", name.encode())
    box.release()
    return box


def test_all_that_is_named_goes_or_nothing(sandboxes, driver):
    first, second = kept(sandboxes, driver, "a"), kept(sandboxes, driver, "b")
    running = sandboxes.create(SPEC, driver=driver, name="busy")
    for names, error in (
        (["a", "none"], NoSuchSandbox), (["a", "snap-0000000000000000"], NoSuchSandbox), (["a", "busy"], SandboxError),
    ):  # fmt: skip
        with pytest.raises(error):
            sandboxes.remove(names)
        assert {record.name for record in sandboxes.home.records()} == {"a", "b", "busy"}
    running.destroy()
    assert sandboxes.remove(["a", first.id, "b", "a"]) > 0
    assert sandboxes.home.records() == [] and sandboxes.home.store.snapshots() == []
    assert sandboxes.home.store.used_bytes() == 0 and second.snapshot is not None


def test_a_snapshot_that_is_all_there_is_of_something_is_not_removed(sandboxes, driver):
    box = kept(sandboxes, driver, "a")
    assert box.snapshot is not None
    with pytest.raises(SandboxError, match="all that there is of the paused sandbox a; .*perilune sandbox rm a"):
        sandboxes.remove([box.snapshot])
    live = sandboxes.create(SPEC, driver=driver)
    log = TrajectoryLog(sandboxes, "task")
    for number in range(2):
        log.record(live, {"n": number}, [number], VERSIONS)
    live.destroy()
    made = steps(sandboxes.home, "task")
    assert list(made) == ["step-000000", "step-000001"]
    with pytest.raises(SandboxError, match="belongs to step-000001 of trajectory task"):
        sandboxes.remove([made["step-000001"]])
    assert trajectories(sandboxes.home) == ["task"]
    assert sandboxes.remove([box.snapshot, "a", "task"]) > 0
    assert trajectories(sandboxes.home) == [] == sandboxes.home.store.snapshots()


def test_a_snapshot_that_two_need_goes_with_the_last_of_them(sandboxes, driver):
    log = TrajectoryLog(sandboxes, "task")
    box = sandboxes.create(SPEC, driver=driver, name="a")
    box.write_file("/workspace/n", b"1")
    shared = log.record(box, {"n": 0}, [0], VERSIONS).environment
    box.revert()
    box.release()
    other = sandboxes.create(SPEC, driver=driver)
    log.record(other, {"n": 1}, [1], VERSIONS)
    other.destroy()
    assert box.snapshot == shared
    log.prune(1)
    assert shared in sandboxes.home.store.snapshots()
    sandboxes.remove(["task"])
    assert sandboxes.home.store.snapshots() == [shared], "the sandbox still lives by it"
    sandboxes.remove(["a"])
    assert sandboxes.home.store.snapshots() == []


def test_a_service_keeps_what_a_paused_sandbox_needs(driver, home):
    api = pytest.importorskip("perilune.sandbox.api", reason="the extra 'serve' is not installed")
    limits = PoolLimits(tick_seconds=3600)
    with Pool(Sandboxes(home, sync="none"), limits) as pool, api.serve_in_thread(pool) as served:
        remote = RemoteSandboxes(served.url)
        box = remote.create(SPEC, driver=driver, name="a")
        assert [one.name for one in box.fork(2, name="a")] == ["a-1", "a-2"]
        assert box.fork(1, name="a")[0].name == "a-3"
        paused = box.pause()
        assert paused is not None
        with pytest.raises(SandboxError, match="all that there is of the paused sandbox a"):
            remote.remove([paused.id])
        with pytest.raises(NoSuchSandbox, match="'none' at .*; nothing was removed"):
            remote.remove(["a-1", "none"])
        remote.remove(["a-1", paused.id, "a"])
        assert {row["name"] for row in remote.records()} == {"a-2", "a-3"} and remote.saved() != []
        assert paused.id not in {row["id"] for row in remote.saved()}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": "x"}', '{"id": "x", "more": 1}', "\0" * 100])
def test_a_record_that_cannot_be_read_is_listed_and_can_be_removed(sandboxes: Sandboxes, driver, content):
    box = kept(sandboxes, driver, "a")
    assert box.snapshot is not None
    Path(sandboxes.home.records_folder, f"{box.id}.json").write_text(content)
    assert [(record.name, record.state) for record in sandboxes.home.records()] == [(box.id, "damaged")]
    with pytest.raises(StoreDamaged, match=f"record of sandbox {box.id} .* cannot be read"):
        sandboxes.open(box.id)
    # Its state is not lost with it.
    assert sandboxes.resume(box.snapshot).read_file("/workspace/n") == b"a"
    with Pool(sandboxes, PoolLimits(tick_seconds=3600)) as pool:
        pool.reaper.tick()
        assert {row["state"] for row in pool.records() if row["id"] == box.id} == {"damaged"}
        pool.destroy(box.id)
        assert box.id not in {record.id for record in pool.home.records()}


def test_the_record_of_a_paused_sandbox_is_on_the_disk(driver, home, monkeypatch):
    synced: list[str] = []
    with Sandboxes(home, sync="batch") as sandboxes:
        box = sandboxes.create(SPEC, driver=driver, name="a")
        monkeypatch.setattr("os.fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").resolve().name))
        box.release()
    record = json.loads(Path(home, "sandboxes", f"{box.id}.json").read_text())
    assert record["state"] == "paused"
    assert any(name.startswith(box.id) for name in synced) and "sandboxes" in synced
