"""The consistency manifest: a step resumes only with its own files, events, tokens and weights, whatever was killed in between."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox import TrajectoryLog
from perilune.sandbox.manifest import Versions, hash_events, hash_tokens
from perilune.sandbox.protocol import Mismatch, StoreDamaged

TESTED_DRIVERS = ("proc",)

VERSIONS = Versions(weights="w7", quantisation="mxfp4-1", template="t1", harness="h1")


def run_steps(log: TrajectoryLog, box, count: int) -> tuple[list[dict], list[int]]:
    """`count` tool steps, each of which changes a file; returns events and tokens."""
    events, tokens = list(log.events), list(range(10 * len(log.events)))
    for number in range(len(events), len(events) + count):
        result = box.exec(["sh", "-c", f"echo {number} >> /workspace/log; cksum /workspace/log"])
        events.append({"tool": "sh", "out": result.stdout.decode(), "code": result.code})
        tokens += range(10 * number, 10 * number + 10)
        log.record(box, events[-1], tokens, VERSIONS, kv_checkpoint=f"kv{number}")
    return events, tokens


def test_a_step_resumes_with_its_files_and_a_second_life_continues_it(sandboxes, box):
    log = TrajectoryLog(sandboxes, "t")
    events, tokens = run_steps(log, box, 3)
    box.destroy()
    again = TrajectoryLog(sandboxes, "t")
    newest = again.latest()
    assert newest is not None
    assert (again.events, again.dropped, again.steps(), newest.parent) == (events, 0, [0, 1, 2], "t/1")
    resumed = again.resume(events, tokens, VERSIONS, kv_checkpoint="kv2")
    assert resumed.read_file("/workspace/log") == b"0\n1\n2\n"
    events, tokens = run_steps(again, resumed, 1)
    assert again.resume(events, tokens, VERSIONS).read_file("/workspace/log") == b"0\n1\n2\n3\n"
    earlier = again.resume(events[:2], tokens[:20], VERSIONS, step=1)
    assert earlier.read_file("/workspace/log") == b"0\n1\n"


@pytest.mark.parametrize(
    "field, change",
    [
        ("event_hash", {"events": [{"tool": "sh", "out": "another", "code": 0}]}),
        ("token_prefix_hash", {"tokens": [1, 2, 3]}),
        ("weights", {"versions": replace(VERSIONS, weights="w8")}),
        ("quantisation", {"versions": replace(VERSIONS, quantisation="bf16")}),
        ("template", {"versions": replace(VERSIONS, template="t2")}),
        ("harness", {"versions": replace(VERSIONS, harness="h2")}),
        ("kv_checkpoint", {"kv_checkpoint": "kv1"}),
    ],
)
def test_what_does_not_match_is_refused_by_name(sandboxes, box, field, change):
    log = TrajectoryLog(sandboxes, "t")
    events, tokens = run_steps(log, box, 1)
    wanted = {"events": events, "tokens": tokens, "versions": VERSIONS, "kv_checkpoint": "kv0", **change}
    live = len(sandboxes._live)
    with pytest.raises(Mismatch, match=f"step 0 of trajectory t: {field} differs") as refused:
        log.resume(wanted["events"], wanted["tokens"], wanted["versions"], kv_checkpoint=wanted["kv_checkpoint"])
    assert refused.value.field == field and len(sandboxes._live) == live


def test_a_snapshot_of_another_template_driver_or_machine_is_refused_by_name(sandboxes, box):
    store = sandboxes.home.store
    snapshot = box.checkpoint()
    for field in ("template_hash", "machine", "contains"):
        with store.writing() as batch:
            other = replace(snapshot, id=store.new_id(), **{field: "other"})
            batch.publish(other)
        with pytest.raises(Mismatch, match=f"snapshot {other.id}: {field} differs: it records 'other'") as refused:
            sandboxes.resume(other.id)
        assert refused.value.field == field


def test_a_snapshot_that_does_not_fit_its_limit_is_told(sandboxes, box):
    store = sandboxes.home.store
    box.exec(["sh", "-c", "head -c 3000000 /dev/urandom > /workspace/a"])
    snapshot = box.checkpoint()
    limits = {**snapshot.spec["limits"], "disk_bytes": 1 << 20}
    with store.writing() as batch:
        batch.publish(replace(snapshot, id="snap-tight", spec={**snapshot.spec, "limits": limits}))
    with pytest.raises(SandboxError, match="do not fit into disk_bytes=1048576"):
        sandboxes.resume("snap-tight")


def test_a_missing_or_damaged_environment_is_named(sandboxes, box):
    log = TrajectoryLog(sandboxes, "t")
    events, tokens = run_steps(log, box, 1)
    manifest = log.manifest(0)
    blob = sandboxes.home.store.blob_path(sandboxes.home.store.snapshot(manifest.environment).layer)
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-3])
    with pytest.raises(StoreDamaged, match=blob.parent.name + blob.name):
        log.resume(events, tokens, VERSIONS)
    blob.write_bytes(whole)
    sandboxes.home.store.delete([manifest.environment])
    with pytest.raises(SandboxError, match=f"no snapshot '{manifest.environment}'"):
        log.resume(events, tokens, VERSIONS)


def test_a_damaged_manifest_or_event_file_is_not_resumed(sandboxes, box):
    log = TrajectoryLog(sandboxes, "t")
    run_steps(log, box, 2)
    path = log.folder / "step-000001.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"w7"', b'"w8"'))
    with pytest.raises(StoreDamaged, match="step-000001.json is damaged"):
        TrajectoryLog(sandboxes, "t")
    path.write_bytes(whole)
    events = log.folder / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b'"code": 0', b'"code": 1', 1))
    with pytest.raises(StoreDamaged, match="does not hold the 2 events of step 1"):
        TrajectoryLog(sandboxes, "t")


def test_a_step_that_cannot_be_saved_does_not_exist(sandboxes, box):
    log = TrajectoryLog(sandboxes, "t")
    events, _ = run_steps(log, box, 1)
    sandboxes.home.store.max_bytes = 0
    with pytest.raises(SandboxError):
        run_steps(log, box, 1)
    assert log.steps() == [0] and log.events == events
    again = TrajectoryLog(sandboxes, "t")
    assert (again.events, again.dropped) == (events, 0)
    assert box.exec(["true"]).code == 0


def test_old_steps_can_be_pruned(sandboxes, box):
    log = TrajectoryLog(sandboxes, "t")
    events, tokens = run_steps(log, box, 3)
    assert log.prune(1) >= 0
    assert log.steps() == [2] and len(sandboxes.home.store.snapshots()) == 1
    assert TrajectoryLog(sandboxes, "t").resume(events, tokens, VERSIONS).read_file("/workspace/log") == b"0\n1\n2\n"
    with pytest.raises(ConfigError, match="letters"):
        TrajectoryLog(sandboxes, "../t")


def test_hashes_tell_orders_and_borders_apart():
    assert hash_tokens([1, 2]) != hash_tokens([2, 1]) != hash_tokens([12]) and hash_tokens([]) == hash_tokens(())
    assert hash_events(["ab"]) != hash_events(["a", "b"]) and hash_events([1]) != hash_events(["1"])


STEPS = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_sandbox_manifest as t
from perilune.sandbox import Sandboxes, TrajectoryLog
sandboxes = Sandboxes(Path(sys.argv[1]), sync="none")
log = TrajectoryLog(sandboxes, "t")
box = log.resume(log.events, list(range(10 * len(log.events))), t.VERSIONS) if log.events else sandboxes.create(driver=sys.argv[2])
real = {{name: getattr(os, name) for name in ("rename", "replace", "write", "fsync", "kill")}}
left = [int(sys.argv[3])]
def counting(name):
    def call(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            real["kill"](os.getpid(), signal.SIGKILL)
        return real[name](*args, **options)
    return call
for name in ("rename", "replace", "write", "fsync"):
    setattr(os, name, counting(name))
t.run_steps(log, box, 5 - len(log.events))
real["write"](1, b"done %d" % (int(sys.argv[3]) - left[0]))
"""


def test_a_trajectory_killed_anywhere_ends_as_an_undisturbed_one(sandboxes, driver, home, tmp_path, count):
    """Kill, restart, kill again …; every restart goes on from a whole step, and the end equals the run that nobody killed."""
    script = STEPS.format(tests=str(__import__("pathlib").Path(__file__).parent))

    def run(folder, point: int) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder), driver, str(point)], capture_output=True, timeout=120
        )
        assert done.returncode in (0, -9), done.stderr
        return done

    calls = int(run(home, 1_000_000).stdout.split()[1])
    undisturbed = TrajectoryLog(sandboxes, "t")
    wanted = [(step, undisturbed.manifest(step).event_hash) for step in undisturbed.steps()]
    rounds = count(full=min(50, calls - 1), reduced=2)
    for number in range(rounds):
        folder = tmp_path / f"killed{number}"
        (folder / "proc").mkdir(parents=True)
        (folder / "proc/templates").symlink_to((home / "proc/templates").readlink())
        first = run(folder, 2 + number * (calls - 2) // rounds)
        assert first.returncode == -9
        while run(folder, max(3, calls // 2 + number)).returncode == -9:
            pass
        with type(sandboxes)(folder, sync="none") as others:
            log = TrajectoryLog(others, "t")
            assert [(step, log.manifest(step).event_hash) for step in log.steps()] == wanted
            assert log.events == undisturbed.events and others.home.store.verify() == []
            others.home.reap()
            assert {record.state for record in others.home.records()} <= {"lost"}
    sandboxes.home.reap()
