"""Owners that are killed: nothing of theirs runs on, nothing is left, and what was saved is whole or reported lost."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perilune.errors import SandboxError
from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.drivers import cgroup
from perilune.sandbox.drivers.cgroup import Group, _own_folders

TESTED_DRIVERS = ("proc",)
OWNER = """
import sys
from pathlib import Path
from perilune.sandbox import Limits, Sandboxes, Spec
sandboxes = Sandboxes(Path(sys.argv[1]), sync="none")
box = sandboxes.create(Spec(limits=Limits(memory_bytes=96 << 20, disk_bytes=16 << 20), changes="disk"), driver=sys.argv[2], name="victim")
"""


def started(home: Path, driver: str, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER + script, str(home), driver],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def guest_pids(box_id: str) -> list[int]:
    """Processes with this sandbox's name in their environment, and the agents above them."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if f"PERILUNE_SANDBOX={box_id}".encode() in Path("/proc", name, "environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def groups(box_id: str) -> list[Path]:
    return [path for folder in set(_own_folders().values()) for path in folder.glob(f"perilune-{box_id}-*")]


def test_no_process_survives_an_owner_that_is_killed(driver, home):
    owner = started(home, driver, """
box.exec(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & (trap '' TERM HUP; setsid sleep 1000 > /dev/null 2>&1 &) ; true"])
print(box.id, flush=True)
box.exec(["sleep", "1000"])
""")  # fmt: skip
    assert owner.stdout is not None
    box_id = owner.stdout.readline().strip()
    deadline = time.monotonic() + 30  # a process that is about to become its program shows no environment
    while len(pids := guest_pids(box_id)) < 2 and time.monotonic() < deadline:
        pass
    assert len(pids) >= 2, "the guest's processes are visible from here"
    descriptors = [os.pidfd_open(pid) for pid in pids]
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    for fd in descriptors:
        assert select.select([fd], [], [], 30)[0], "a guest's process outlived its owner"
        os.close(fd)
    # What was started after the list was made is ended by the kernel as well, in its own time.
    deadline = time.monotonic() + 30
    while guest_pids(box_id) and time.monotonic() < deadline:
        pass
    assert guest_pids(box_id) == []
    with Sandboxes(home, sync="none") as sandboxes:
        assert [record.state for record in sandboxes.home.records()] == ["lost"]
        with pytest.raises(SandboxError, match="is lost: the process that had it .* was killed"):
            sandboxes.open("victim")
        sandboxes.home.reap()
        assert groups(box_id) == [] and list((home / driver / "scratch").iterdir()) == []
        sandboxes.home.remove("victim")
        assert sandboxes.home.records() == [] and list(sandboxes.home.records_folder.iterdir()) == []


def test_a_stopped_agent_does_not_keep_a_guest_alive(driver, home):
    """The agent cannot notice its owner's end while it is stopped; the kernel does."""
    owner = started(home, driver, """
import os
print(box.id, open(f"/proc/self/fdinfo/{box._machine._pidfd}").read().split("Pid:")[1].split()[0], flush=True)
box.exec(["sleep", "1000"])
""")  # fmt: skip
    assert owner.stdout is not None
    box_id, agent = owner.stdout.readline().split()
    fd = os.pidfd_open(int(agent))
    os.kill(int(agent), signal.SIGSTOP)
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    assert select.select([fd], [], [], 30)[0]
    os.close(fd)
    assert guest_pids(box_id) == []
    with Sandboxes(home, sync="none") as sandboxes:
        sandboxes.home.reap()
    assert groups(box_id) == []


def test_a_lost_sandbox_names_its_last_snapshot_and_that_resumes(driver, home):
    owner = started(home, driver, """
box.exec(["sh", "-c", "echo saved > /workspace/a"])
print(box.checkpoint().id, flush=True)
sandboxes.home.save(box.record)
box.exec(["sh", "-c", "echo unsaved > /workspace/a"])
print("ready", flush=True)
sys.stdin.read()
""")  # fmt: skip
    assert owner.stdout is not None
    snapshot = owner.stdout.readline().strip()
    assert owner.stdout.readline() == "ready\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    with Sandboxes(home, sync="none") as sandboxes:
        assert sandboxes.resume(snapshot).read_file("/workspace/a") == b"saved\n"
        with pytest.raises(SandboxError, match=f"last snapshot is {snapshot}"):
            sandboxes.open("victim")
        sandboxes.home.remove("victim")


SAVER = """
import os, signal
real = {name: getattr(os, name) for name in ("rename", "replace", "write")}
left = [int(sys.argv[3])]
def counting(name):
    def call(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*args, **options)
    return call
for number in range(3):
    box.exec(["sh", "-c", f"echo {number} > /workspace/n; head -c 100000 /dev/urandom > /workspace/big; cksum < /workspace/big > /workspace/sum"])
    for name in real: setattr(os, name, counting(name))
    box.pause()
    sandboxes.home.save(box.record)
    for name in real: setattr(os, name, real[name])
    print(number, box.snapshot, flush=True)
    box.resume()
print("calls", int(sys.argv[3]) - left[0], flush=True)
"""


def test_an_owner_killed_while_it_saves_leaves_whole_snapshots_only(driver, home, tmp_path, count):
    def run(point: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", OWNER + SAVER, str(home), driver, str(point)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode in (0, -9), done.stderr
        return done.stdout.split("\n")[:-1]

    calls = int(run(1_000_000)[-1].split()[1])
    rounds = count(full=50, reduced=3)
    with Sandboxes(home, sync="none") as sandboxes:
        sandboxes.home.remove("victim")
        for number in range(rounds):
            before = set(sandboxes.home.store.snapshots())
            lines = run(1 + number * (calls - 1) // rounds)
            told = dict(line.split()[::-1] for line in lines if not line.startswith("calls"))
            made = set(sandboxes.home.store.snapshots()) - before
            # At most one was published whose owner could not say so any more; none that it told of is missing.
            assert set(told) <= made and len(made) <= len(told) + 1
            assert sandboxes.home.store.verify() == []
            for snapshot in made:
                box = sandboxes.resume(snapshot)
                assert box.exec(["sh", "-c", "cksum < /workspace/big | cmp - /workspace/sum"]).code == 0
                assert box.read_file("/workspace/n").decode().strip() == told.get(snapshot, str(len(told)))
                box.destroy()
            for record in sandboxes.home.records():
                sandboxes.home.remove(record.id)


def test_many_lives_leave_nothing_behind(driver, home, count):
    def inventory() -> tuple[int, list[str], list[str]]:
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
        groups = [str(path) for folder in set(_own_folders().values()) for path in folder.glob("perilune-sb*")]
        return len(os.listdir("/proc/self/fd")), mounts, groups

    with Sandboxes(home, sync="none") as sandboxes:
        sandboxes.create(driver=driver).destroy()
        before = inventory()
        made = []
        for _ in range(count(full=1000, reduced=50)):
            box = sandboxes.create(Spec(limits=Limits(memory_bytes=96 << 20, disk_bytes=16 << 20)), driver=driver)
            assert box.exec(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo x > /workspace/x"]).code == 0
            made.append(box.id)
            box.destroy()
        descriptors, mounts, left = inventory()
        assert descriptors == before[0] and mounts == []
        assert not [path for path in left if path.split("-")[1] in made]
        assert list(sandboxes.home.records_folder.iterdir()) == [] == list((home / driver / "scratch").iterdir())
    assert not [pid for box_id in made for pid in guest_pids(box_id)]


def fork_server(sandboxes, driver):
    owner = getattr(sandboxes.driver(driver), "keeper", sandboxes.driver(driver))
    if not hasattr(owner, "_server"):
        pytest.skip(f"{driver} has no fork server")
    return owner._server.process


def test_closing_ends_the_fork_server(driver, home):
    with Sandboxes(home, sync="none") as sandboxes:
        sandboxes.create(driver=driver)
        process = fork_server(sandboxes, driver)
    assert process.returncode is not None


def test_a_fork_server_that_was_killed_is_started_again(driver, home):
    with Sandboxes(home, sync="none") as sandboxes:
        first = sandboxes.create(driver=driver)
        process = fork_server(sandboxes, driver)
        process.kill()
        process.wait()
        assert sandboxes.create(driver=driver).exec(["echo", "again"]).stdout == b"again\n"
        with pytest.raises(SandboxError, match="has ended"):
            first.exec(["true"])


def test_a_group_whose_limits_cannot_be_set_says_why(monkeypatch):
    monkeypatch.setattr("perilune.sandbox.drivers.cgroup._own_folders", dict)
    group = Group("perilune-test", Limits())
    assert group.held == {} and set(group.missing) == {"memory", "pids", "cpu"}
    assert all("none is mounted" in reason for reason in group.missing.values())


def test_groups_of_forgotten_folders_go_once_they_are_old_and_empty(monkeypatch):
    group = Group("perilune-sbforgotten-00000000", Limits())
    if not group.paths:
        pytest.skip(f"no control group may be made here: {group.missing}")
    monkeypatch.setattr(cgroup, "_groups", lambda: {Path(path) for path in group.paths})
    cgroup.sweep(())
    assert all(os.path.isdir(path) for path in group.paths), "it is young"
    monkeypatch.setattr(cgroup, "FORGOTTEN_SECONDS", -1.0)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        for procs in group.procs_files:
            Path(procs).write_text(str(pid))
        cgroup.sweep(())
        assert all(os.path.isdir(path) for path in group.paths), "a process is in it"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    deadline = time.monotonic() + 30
    while any(os.path.isdir(path) for path in group.paths) and time.monotonic() < deadline:
        cgroup.sweep(())
    assert not any(os.path.isdir(path) for path in group.paths)
