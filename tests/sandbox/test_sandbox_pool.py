"""The pool: room by memory, warm sandboxes, parking, lifetimes, recovery snapshots, and what the next pool finds after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perilune.errors import CapacityError, ConfigError, SandboxError
from perilune.sandbox import Limits, Sandboxes, Spec, State
from perilune.sandbox.memory import Memory, measured
from perilune.sandbox.pool import Pool, PoolLimits, Warm
from perilune.sandbox.protocol import GuestLost, TransitionError

TESTED_DRIVERS = ("proc",)

SPEC = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32))
QUIET = {"tick_seconds": 3600.0}
"""The reaper looks only when a test tells it to."""


@pytest.fixture
def make(driver, home: Path) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def pool(warm=(), **limits) -> Pool:
        made.append(Pool(Sandboxes(home, sync="none"), PoolLimits(**{**QUIET, "wait_seconds": 0.0, **limits}), warm))
        return made[-1]

    yield pool
    for one in made:
        one.close()


def rest(pool: Pool, name: str, seconds: float) -> None:
    """As if nobody had used it for so long."""
    pool.entry(name).sandbox.used -= seconds


def test_promised_memory_is_limited_and_the_refusal_has_the_numbers(make, driver):
    pool = make(memory_bytes=SPEC.limits.memory_bytes, overcommit=2.0, park_seconds=1e6)
    for _ in range(2):
        pool.create(SPEC, driver=driver)
    with pytest.raises(
        CapacityError, match=rf"would be {3 * (128 << 20)} bytes, and 2 times {128 << 20} may be promised"
    ):
        pool.create(SPEC, driver=driver)
    few = make(sandboxes=1, park_seconds=1e6)
    few.create(SPEC, driver=driver)
    with pytest.raises(CapacityError, match="1 sandboxes run, and 1 may"):
        few.create(SPEC, driver=driver)


def test_held_memory_is_measured_and_limited(make, driver):
    pool = make(memory_bytes=64 << 20, overcommit=1000, park_seconds=1e6)
    box = pool.create(SPEC, driver=driver)
    pool.reaper.tick()
    before = pool.usage().memory.total
    assert 0 < before < 64 << 20 and box.id in pool.admission.measured
    box.exec(["sh", "-c", "head -c 15000000 /dev/urandom > /dev/shm/x"])
    pool.reaper.tick()
    grown = pool.usage().memory.total - before
    if grown < 1 << 20:
        pytest.skip("nothing counts files in memory here: no control group")
    assert 14_000_000 < grown < 24_000_000
    pool.admission.learn(driver, SPEC, 60 << 20)
    with pytest.raises(CapacityError, match="would hold"):
        pool.create(SPEC, driver=driver)
    assert pool.usage().overcommit == pytest.approx((128 << 20) / pool.usage().memory.total)


def test_a_call_waits_for_room(make, driver):
    pool = make(sandboxes=1, wait_seconds=30.0, park_seconds=1e6)
    first = pool.create(SPEC, driver=driver)
    threading.Timer(0.1, pool.destroy, [first.id]).start()
    assert pool.create(SPEC, driver=driver).exec(["echo", "in"]).stdout == b"in\n"


def test_an_idle_sandbox_makes_room_and_comes_back_by_itself(make, driver):
    pool = make(sandboxes=1, park_seconds=10.0)
    first = pool.create(SPEC, driver=driver, name="first")
    first.write_file("/workspace/a", b"kept")
    rest(pool, "first", 11)
    second = pool.create(SPEC, driver=driver, name="second")
    states = {record["name"]: record["state"] for record in pool.records()}
    assert states == {"first": "parked", "second": "running"} and not first.held
    with pytest.raises(TransitionError):
        first.exec(["true"])  # By itself it is paused; by the pool it is woken.
    rest(pool, "second", 11)
    with pool.use("first") as box:
        assert box.read_file("/workspace/a") == b"kept"
    assert second.state is State.PAUSED and pool.usage().held == 1


def test_what_a_pause_would_lose_is_not_parked(make, driver):
    pool = make(park_seconds=0.0)
    box = pool.create(SPEC, driver=driver, name="busy")
    box.exec(["sh", "-c", "sleep 1000 > /dev/null 2>&1 &"])
    rest(pool, "busy", 100)
    if box.unsaved_processes():
        assert not pool.park(pool.entry("busy"), 1.0)
        until = time.monotonic() + 60
        while box.unsaved_processes():  # what goes to sleep may still be a shell when it is first looked for
            box.exec(["sh", "-c", "kill $(cat /proc/[0-9]*/stat | grep '(sleep)' | cut -d' ' -f1)"])
            assert time.monotonic() < until
    rest(pool, "busy", 100)
    with pool.use("busy"):
        assert not pool.park(pool.entry("busy"), 1.0), "somebody is using it"
    rest(pool, "busy", 100)
    assert pool.park(pool.entry("busy"), 1.0)


def test_parking_again_leaves_one_snapshot_and_destroying_none(make, driver):
    pool = make(idle_seconds=5.0)
    box = pool.create(SPEC, driver=driver, name="a")
    for number in range(3):
        with pool.use("a"):
            box.write_file("/workspace/n", str(number).encode())
        rest(pool, "a", 6)
        pool.reaper.tick()
        assert box.state is State.PAUSED
    pool.reaper._collect()
    assert pool.home.store.snapshots() == [box.snapshot]
    pool.destroy("a")
    pool.reaper._collect()
    assert pool.home.store.snapshots() == [] and pool.home.store.used_bytes() == 0
    assert list(pool.reaper.unwanted.iterdir()) == []


def test_a_secret_in_a_file_keeps_a_sandbox_from_being_parked_not_from_running(make, driver):
    pool = make(idle_seconds=5.0)
    box = pool.create(SPEC, driver=driver, name="a")
    box.exec(["sh", "-c", "echo $KEY > /workspace/key"], secrets={"KEY": "long-enough-secret"})
    rest(pool, "a", 6)
    pool.reaper.tick()
    assert box.state is State.RUNNING and not box.record.parked and pool.home.store.snapshots() == []


def test_lifetimes_end_running_and_paused_sandboxes(make, driver):
    pool = make()
    pool.create(SPEC, driver=driver, name="short", lifetime_seconds=1000)
    pool.create(SPEC, driver=driver, name="paused", lifetime_seconds=1000)
    pool.create(SPEC, driver=driver, name="kept", lifetime_seconds=0)
    pool.pause("paused")
    pool.reaper.tick()
    assert len(pool.records()) == 3
    for name in ("short", "paused"):
        pool.entry(name).sandbox.record.ends = time.time() - 1
    pool.reaper.tick()
    assert [record["name"] for record in pool.records()] == ["kept"]


def test_warm_sandboxes_are_used_and_made_again(make, driver):
    pool = make([Warm(driver=driver, spec=SPEC, count=2)])
    pool.reaper.tick()
    waiting = {record["id"] for record in pool.records() if record["state"] == "warm"}
    assert len(waiting) == 2 and pool.usage().warm == 2
    box = pool.create(SPEC, driver=driver, name="mine")
    assert box.id in waiting and box.name == "mine" and box.exec(["echo", "warm"]).stdout == b"warm\n"
    other = pool.create(Spec(limits=Limits(memory_bytes=160 << 20, disk_bytes=16 << 20)), driver=driver)
    assert other.id not in waiting
    pool.reaper.tick()
    assert pool.usage().warm == 2
    with pytest.raises(SandboxError, match="already"):
        pool.create(SPEC, driver=driver, name="mine")
    assert pool.usage().warm == 2


def test_recovery_snapshots_follow_use(make, driver):
    pool = make(snapshot_seconds=5.0)
    box = pool.create(SPEC, driver=driver, name="a")
    pool.entry("a").saved -= 6
    rest(pool, "a", 7)
    pool.reaper.tick()
    assert pool.home.store.snapshots() == [], "nobody has used it since it was made"
    for number in range(2):
        box.write_file("/workspace/n", str(number).encode())
        pool.entry("a").saved -= 6
        box.used = time.monotonic()
        pool.reaper.tick()
    pool.reaper._collect()
    assert pool.home.store.snapshots() == [box.snapshot]
    assert pool.resume_snapshot(box.snapshot).read_file("/workspace/n") == b"1"


def test_forks_take_room_and_times_from_the_original(make, driver):
    pool = make(sandboxes=3, park_seconds=1e6)
    box = pool.create(SPEC, driver=driver, lifetime_seconds=100, idle_seconds=7)
    made = pool.fork(box.id, 2)
    assert all(fork.record.idle_seconds == 7 and 0 < fork.record.ends <= box.record.ends + 1 for fork in made)
    with pytest.raises(CapacityError):
        pool.fork(box.id, 1)


def test_a_guest_that_ended_by_itself_is_listed_as_lost(make, driver):
    pool = make()
    box = pool.create(SPEC, driver=driver)
    os.kill(box._machine.pids()[-1] if box._machine else 0, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while box.alive() and time.monotonic() < deadline:
        pass
    pool.reaper.tick()
    assert [record["state"] for record in pool.records()] == ["lost"]
    with pytest.raises(SandboxError, match="is lost"), pool.use(box.id):
        pass
    pool.destroy(box.id)
    assert pool.records() == []


def test_a_machine_that_dies_under_a_command_is_a_typed_error(make, driver):
    pool = make()
    box = pool.create(SPEC, driver=driver)
    with pytest.raises(GuestLost), pool.use(box.id) as used:
        os.kill(used._machine.pids()[-1] if used._machine else 0, signal.SIGKILL)
        used.exec(["sleep", "100"])
    assert box.id not in pool.entries


def test_a_closed_pool_leaves_paused_sandboxes_that_the_next_one_wakes(make, driver):
    first = make()
    box = first.create(SPEC, driver=driver, name="long")
    box.write_file("/workspace/a", b"kept")
    first.create(SPEC, driver=driver, name="frozen")
    first.pause("frozen", keep_memory=True)
    first.close()
    second = make()
    assert {record["name"]: record["state"] for record in second.records()} == {"long": "parked", "frozen": "paused"}
    with second.use("long") as again:
        assert again.read_file("/workspace/a") == b"kept" and again.id == box.id and again.generation != box.generation


DAEMON = """
import sys
from pathlib import Path
from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.pool import Pool, PoolLimits
pool = Pool(Sandboxes(Path(sys.argv[1]), sync="none"), PoolLimits(tick_seconds=3600))
spec = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32))
for name in ("paused", "parked", "running", "saved"):
    pool.create(spec, driver=sys.argv[2], name=name).write_file("/workspace/a", name.encode())
pool.pause("paused")
pool.park(pool.entry("parked"), 0.0)
pool.entry("saved").sandbox.checkpoint()
pool.entry("saved").sandbox.write_file("/workspace/a", b"unsaved")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_daemon_loses_no_paused_sandbox_and_reports_the_others(make, driver, home):
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(home), driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None and daemon.stdout.readline() == "ready\n"
    daemon.send_signal(signal.SIGKILL)
    daemon.wait(60)
    pool = make()
    found = {record["name"]: record for record in pool.records()}
    assert {name: record["state"] for name, record in found.items()} == {
        "paused": "paused", "parked": "parked", "running": "lost", "saved": "lost",
    }  # fmt: skip
    pool.resume("paused")
    for name in ("paused", "parked"):
        with pool.use(name) as box:
            assert box.read_file("/workspace/a") == name.encode()
    with pytest.raises(SandboxError, match=f"last snapshot is {found['saved']['snapshot']}"):
        pool.entry("saved")
    assert pool.resume_snapshot(found["saved"]["snapshot"]).read_file("/workspace/a") == b"saved"


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="overcommit must be 1 or more"):
        PoolLimits(overcommit=0.5)
    with pytest.raises(ConfigError, match="idle_seconds=-1"):
        PoolLimits(idle_seconds=-1)


def test_memory_of_shared_pages_is_shared():
    held = bytearray(os.urandom(1 << 20) * 16)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        both = measured([os.getpid(), pid])
        # Pages that both map, and nobody else, are counted once in pss and twice in rss.
        assert len(held) <= both.pss <= both.rss - len(held)
        assert measured([1 << 22]) == Memory()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
