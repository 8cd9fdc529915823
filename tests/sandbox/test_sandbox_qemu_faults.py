"""Machines and their owners killed anywhere in their work, and many lives: each sandbox is as it was saved or reported lost; nothing is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perilune.sandbox import Sandboxes
from perilune.sandbox.drivers.cgroup import _own_folders
from perilune.sandbox.pool import Pool, PoolLimits

TESTED_DRIVERS = ("qemu",)
POINTS = 20
VICTIMS = ("owner", "machine")

OWNER = """
import os, signal, sys
from pathlib import Path
import perilune.sandbox.guest.wire as wire
from perilune.errors import SandboxError
from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.qemu_monitor import Monitor
from perilune.sandbox.pool import Pool, PoolLimits

home, victim, point, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
left, live = [point], {}

def fault():
    if victim == "owner":
        os.kill(os.getpid(), signal.SIGKILL)
    for box in list(live.values()):
        for pid in box._machine.pids() if box._machine is not None else ():
            os.kill(pid, signal.SIGKILL)
            return

def counted(function):
    def call(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            fault()
        return function(*args, **options)
    return call

def told(*words):
    print(*words, flush=True)

def tried(words, work, *args):
    told("begun", *words)
    try:
        value = work(*args)
    except SandboxError as error:
        told("failed", words[0], words[1], type(error).__name__)
        return None
    told("done", *words)
    return value

# Its memory, its files and the answer of a process that has run all the time say the same number.
BEGIN = "mkfifo /tmp/ask /tmp/answer; (exec 3<>/tmp/ask 4<>/tmp/answer; v=none; while read -r x <&3; do case $x in get) echo $v >&4;; *) v=$x;; esac; done) > /dev/null 2>&1 &"
STEP = "echo {0} > /tmp/ask; echo {0} > /workspace/n; head -c 70000 /dev/urandom > /workspace/big; cksum < /workspace/big > /workspace/sum"

def step(name, number):
    def work():
        with pool.use(name) as box:
            script = (BEGIN + " " if number == 0 else "") + STEP.format(f"{name}{number}")
            if box.exec(["sh", "-c", script]).code != 0:
                raise SandboxError("the step failed")
    tried(("step", name, number), work)

pool = Pool(Sandboxes(home, sync="none"), PoolLimits(tick_seconds=3600))
spec = Spec(limits=Limits(memory_bytes=int(sys.argv[5])))
pool.create(spec, driver="qemu").destroy()   # Template and keeper exist before the counting.
for name in ("rename", "replace", "write", "writev", "unlink", "mkdir", "open", "kill"):
    setattr(os, name, counted(getattr(os, name)))
wire.send = counted(wire.send)
Monitor.execute = counted(Monitor.execute)
Channel._send = counted(Channel._send)

def make(name):
    box = pool.create(spec, driver="qemu", name=name)
    live[name] = box

for name in ("a", "b"):
    tried(("make", name), make, name)
for number in range(rounds):
    for name in ("a", "b"):
        step(name, number)
    tried(("pause", "a", number), pool.pause, "a")
    def save():
        with pool.use("b") as box:
            told("checkpoint", box.checkpoint().id, f"b{number}")
    tried(("checkpoint", "b", number), save)
    fork = tried(("fork", "b", number), pool.fork, "b", 1)
    if fork:
        told("forked", fork[0].id, f"b{number}")
        tried(("pause", fork[0].id, f"b{number}"), pool.pause, fork[0].id)
    if number < rounds - 1:
        tried(("wake", "a"), pool.resume, "a")
tried(("destroy", "b"), pool.destroy, "b")
told("calls", point - left[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_at(home: Path, victim: str, point: int, rounds: int, memory: int) -> list[list[str]]:
    """What an owner said that was killed, or whose first machine was, at its `point`-th call."""
    command = [sys.executable, "-c", OWNER, str(home), victim, str(point), str(rounds), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def machines(home: Path) -> list[str]:
    """Command lines of the QEMUs that have something of this folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "qemu-system" in line and str(home.resolve() / "qemu") in line:
                    found.append(line)
    return found


def content(box) -> str:
    """What a sandbox holds; memory, files and a running process must agree."""
    check = "cksum < /workspace/big | cmp - /workspace/sum && echo get > /tmp/ask && read -r v < /tmp/answer && echo $v && cat /workspace/n"
    result = box.exec(["sh", "-c", check], timeout=60)
    assert result.code == 0, result
    memory, file = result.stdout.decode().split()
    assert memory == file, "memory and files were cut at different instants"
    return file


def check_after(home: Path, said: list[list[str]]) -> None:
    """Every sandbox that was spoken of is as it was saved, or listed as lost; then everything is removed and nothing is left."""
    made = {words[2] for words in said if words[:2] == ["done", "make"]} | {
        words[1] for words in said if words[0] == "forked"
    }
    ended = {words[2] for words in said if words[0] in ("begun", "done") and words[1] == "destroy"}
    told = [words for words in said if words[0] in ("begun", "done")]
    saved = {words[2]: words[3] for words in told if words[:2] == ["done", "pause"]}
    for words in told:  # A pause that was followed by a waking is a pause no more.
        if words[:2] == ["begun", "wake"]:
            later = [one for one in told[told.index(words) :] if one[:3] == ["done", "pause", words[2]]]
            if not later:
                saved.pop(words[2], None)
    with Pool(Sandboxes(home, sync="none"), PoolLimits(tick_seconds=3600)) as pool:
        pool.reaper.tick()
        assert pool.home.store.verify() == []
        rows = {name: row for row in pool.records() for name in (row["name"], row["id"])}
        for name in made - ended:
            assert name in rows and rows[name]["state"] in ("paused", "parked", "lost"), (name, said[-4:])
        for name in saved:
            assert name in ended or rows[name]["state"] in ("paused", "parked"), (name, rows[name], said[-4:])
        for row in {row["id"]: row for row in rows.values() if row["state"] != "lost"}.values():
            pool.resume(row["id"])
            with pool.use(row["id"]) as box:
                number = content(box)
            owner = row["name"] if row["name"] in ("a", "b") else "b"
            assert number in {f"{owner}{words[3]}" for words in told if words[1:3] == ["step", owner]}, (row, number)
            if row["name"] in saved:
                assert number in (saved[row["name"]], f"{owner}{saved[row['name']]}"), (
                    "another state than was told to be saved"
                )
        for words in said:
            if words[0] == "checkpoint":
                box = pool.resume_snapshot(words[1])
                assert content(box) == words[2]
                pool.destroy(box.id)
        ids = {row["id"] for row in pool.records()}
        for name in ids:
            pool.destroy(name)
        pool.home.store.delete(pool.home.store.snapshots())
        assert pool.records() == [] and pool.home.store.used_bytes() == 0
    # The kernel ends what a killed owner had started in its own time, which after an early kill is about now.
    deadline = time.monotonic() + 30
    while machines(home) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert machines(home) == [] == list((home / "sandboxes").iterdir())
    folders = set(_own_folders().values())
    assert not [path for folder in folders for path in folder.glob("perilune-sb*") if path.name.split("-")[1] in ids]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_machines_and_owners_killed_at_any_point_lose_nothing_in_silence(driver, home, spec, count):
    rounds, memory = count(full=50, reduced=1), spec.limits.memory_bytes
    calls, steps = 120, 1
    if rounds > 1:
        steps = 2
        said = killed_at(home, "owner", 1 << 30, steps, memory)
        calls = int(said[-1][1])
        check_after(home, said)
        assert calls > POINTS
    for number in range(rounds):
        # 20 points spread over all calls; each time round they move on by one. Every second time a machine is the victim.
        point = 1 + (number * 7 % POINTS) * (calls - 1) // POINTS + number // POINTS
        said = killed_at(home, VICTIMS[number % 2], point + (calls // 2 if rounds == 1 else 0), steps, memory)
        check_after(home, said)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_machines_leave_nothing_behind(driver, home, spec, count):
    def inventory() -> dict[str, object]:
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
        groups = [
            path
            for folder in set(_own_folders().values())
            for path in folder.glob("perilune-sb*")
            if path.name.split("-")[1] in made
        ]
        files = sorted(str(path.relative_to(home)) for path in home.rglob("*") if "/templates/" not in str(path))
        return {"descriptors": len(os.listdir("/proc/self/fd")), "mounts": mounts, "groups": groups, "files": files,
                "threads": len(os.listdir("/proc/self/task")), "listening": _listening()}  # fmt: skip

    made: set[str] = set()
    with Sandboxes(home, sync="none") as sandboxes:
        for _ in range(2):  # From the second on, the next machine is started ahead.
            sandboxes.create(spec, driver=driver).destroy()
        _settled(sandboxes)
        before = inventory()
        for _ in range(count(full=1000, reduced=2)):
            box = sandboxes.create(spec, driver=driver)
            made.add(box.id)
            assert box.exec(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo x > /workspace/x"]).code == 0
            box.destroy()
        _settled(sandboxes)
        after = inventory()
        # A thread of an earlier test of this process may have ended meanwhile.
        assert int(str(after.pop("threads"))) <= int(str(before.pop("threads")))
        assert after == before
    assert machines(home) == []


def _settled(sandboxes: Sandboxes) -> None:
    """Wait until the next machine has been started ahead."""
    starter = getattr(sandboxes.driver("qemu"), "_starter", None)
    if starter is not None:
        starter.join(60)


def _listening() -> int:
    """Ports that this process listens on."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    lines = [
        line.split() for file in ("tcp", "tcp6") for line in Path("/proc/self/net", file).read_text().splitlines()[1:]
    ]
    return sum(1 for fields in lines if fields[3] == "0A" and fields[9] in inodes)
