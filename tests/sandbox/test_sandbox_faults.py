"""Daemons killed anywhere in their work, and messages that are none: each sandbox is as it was saved or reported lost, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perilune.errors import PeriluneError
from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.drivers.cgroup import _own_folders
from perilune.sandbox.guest import layer, wire
from perilune.sandbox.pool import Pool, PoolLimits
from perilune.sandbox.protocol import State, TransitionError

TESTED_DRIVERS = ("proc",)
POINTS = 20

DAEMON = """
import os, signal, sys
from pathlib import Path
import perilune.sandbox.guest.wire as wire
from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.pool import Pool, PoolLimits

left = [int(sys.argv[3])]
def counted(function):
    def call(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call

pool = Pool(Sandboxes(Path(sys.argv[1]), sync="none"), PoolLimits(tick_seconds=3600))
spec = Spec(limits=Limits(disk_bytes=16 << 20, processes=32))
pool.create(spec, driver=sys.argv[2]).destroy()   # Template and fork server exist before the counting.
for name in ("rename", "replace", "write", "unlink", "mkdir", "rmdir", "open"):
    setattr(os, name, counted(getattr(os, name)))
wire.send = counted(wire.send)

def told(*words):
    print(*words, flush=True)

def step(box, number):
    box.exec(["sh", "-c", f"echo {number} > /workspace/n; head -c 70000 /dev/urandom > /workspace/big; cksum < /workspace/big > /workspace/sum"])

for name in ("a", "b", "c"):
    told("making", name)
    pool.create(spec, driver=sys.argv[2], name=name)
    told("made", name)
for number in range(2):
    for name in ("a", "b", "c"):
        with pool.use(name) as box:
            step(box, f"{name}{number}")
        told("stepped", name, number)
    told("saving", "a", number); pool.pause("a"); told("saved", "a", number)
    told("saving", "b", number); pool.park(pool.entry("b"), 0.0); told("saved", "b", number)
    with pool.use("c") as box:
        told("checkpoint", box.checkpoint().id, f"c{number}")
    fork = pool.fork("c", 1)[0]
    told("forked", fork.id, number)
    pool.pause(fork.id)
    told("saved", fork.id, number)
    if number == 0:
        told("waking", "a"); pool.resume("a"); told("woken", "a")
        told("waking", "b")
        with pool.use("b"): told("woken", "b")
told("ending", "a"); pool.destroy("a"); told("ended", "a")
told("calls", int(sys.argv[3]) - left[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_at(home: Path, driver: str, point: int) -> list[list[str]]:
    """What a daemon said that was killed at its `point`-th call."""
    done = subprocess.run(
        [sys.executable, "-c", DAEMON, str(home), driver, str(point)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == -9, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def guests() -> set[str]:
    """Ids of sandboxes that some process on this machine belongs to."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                for variable in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"PERILUNE_SANDBOX="):
                        found.add(variable.partition(b"=")[2].decode())
    return found


def check_after(home: Path, driver: str, said: list[list[str]]) -> None:
    """Every sandbox that was spoken of is paused as it was saved, or listed as lost; then everything is removed and nothing is left."""
    made = {words[1] for words in said if words[0] in ("made", "forked")}
    ended = {words[1] for words in said if words[0] in ("ending", "ended")}
    saves: dict[str, str] = {}
    for words in said:
        if words[0] == "saved":
            saves[words[1]] = words[2]
        elif words[0] == "waking":
            saves.pop(words[1], None)
    with Pool(Sandboxes(home, sync="none"), PoolLimits(tick_seconds=3600)) as pool:
        pool.reaper.tick()
        assert pool.home.store.verify() == []
        rows = {name: row for row in pool.records() for name in (row["name"], row["id"])}
        for name in made - ended:
            assert name in rows, f"{name} is nowhere: {said[-3:]}"
            assert rows[name]["state"] in ("paused", "parked", "lost"), rows[name]
        for name in saves:
            if name in ended:
                continue
            # Its save was told of, and nothing after it began: it must be there, whole.
            assert rows[name]["state"] in ("paused", "parked"), (name, rows[name], said[-3:])
        for row in {row["id"]: row for row in rows.values()}.values():
            if row["state"] == "lost":
                continue
            pool.resume(row["id"])
            with pool.use(row["id"]) as box:
                number = box.exec(["cat", "/workspace/n"]).stdout.decode().strip()
                assert box.exec(["sh", "-c", "cksum < /workspace/big | cmp - /workspace/sum"]).code == 0
            owner = row["name"] if row["name"] in ("a", "b", "c") else "c"
            attempted = [words[2] for words in said if words[0] == "stepped" and words[1] == owner]
            assert number in {f"{owner}{attempt}" for attempt in attempted}, (row, number)
            if row["name"] in saves:
                assert number == f"{owner}{saves[row['name']]}", "an older state than the one whose save was told"
        for words in said:
            if words[0] == "checkpoint":
                box = pool.resume_snapshot(words[1])
                assert box.read_file("/workspace/n").decode().strip() == words[2]
                pool.destroy(box.id)
        ids = {row["id"] for row in pool.records()}
        for name in ids:
            pool.destroy(name)
        assert pool.records() == [] and not guests() & ids
        pool.home.store.delete(pool.home.store.snapshots())
        assert pool.home.store.used_bytes() == 0
    assert list((home / "sandboxes").iterdir()) == [] == list(home.glob("*/scratch/*"))
    left = [
        path
        for folder in set(_own_folders().values())
        for path in folder.glob("perilune-sb*")
        if path.name.split("-")[1] in ids
    ]
    assert left == []


@pytest.mark.timeout(1800)
def test_a_daemon_killed_at_any_point_loses_nothing_in_silence(driver, home, count):
    said = killed_at(home, driver, 1 << 30)
    calls = int(said[-1][1])
    check_after(home, driver, said)
    assert calls > POINTS
    for number in range(count(full=50, reduced=3)):
        # 20 points spread over all calls, and each time the points move on by one.
        point = 1 + (number * 7 % POINTS) * (calls - 1) // POINTS + number // POINTS
        check_after(home, driver, killed_at(home, driver, point))


def packets(seed: int, count: int):
    """Bytes that are almost messages."""
    draw = random.Random(seed)
    good = [b'i{"op": "run", "argv": ["ls"]}', b"m", b"i{}", b'i{"done": "freeze"}', b"i[]", b'i{"a": ' + b"[" * 2000]
    for _ in range(count):
        data = bytearray(draw.choice(good))
        for _ in range(draw.randrange(4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        yield bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.3 else data) + draw.randbytes(
            draw.choice((0, 0, 9))
        )


def test_messages_that_are_none_are_refused_and_leave_no_descriptor(count):
    mine, its = wire.pair()
    before = len(os.listdir("/proc/self/fd"))
    draw = random.Random(5)
    for packet in packets(4, count(full=10_000, reduced=500)):
        fds = [0] * draw.randrange(4)
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, "little") for fd in fds))] if fds else []
        )
        its.sendmsg([packet or b"i"], rights)
        try:
            received = wire.receive(mine)
        except wire.Malformed:
            continue
        assert received is not None and isinstance(received[0], dict)
        for fd in received[1]:
            os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    mine.close()
    its.close()


def test_streams_that_are_none_are_refused_within_their_limit(tmp_path, count):
    (tmp_path / "a").write_bytes(os.urandom(100_000))
    (tmp_path / "b").symlink_to("a")
    good = bytearray()
    fd = os.open(tmp_path, os.O_RDONLY)
    layer.stream([fd], [""], good.extend)
    os.close(fd)
    draw = random.Random(6)
    for _ in range(count(full=10_000, reduced=300)):
        data = bytearray(good)
        for _ in range(1 + draw.randrange(3)):
            data[draw.randrange(min(len(data), 600))] = draw.randrange(256)
        rest = memoryview(bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data))

        def read(size: int) -> bytes:
            nonlocal rest
            piece, rest = rest[:size], rest[size:]
            if len(piece) != size:
                raise ValueError("the stream ends")
            return bytes(piece)

        try:
            kept = sum(len(chunk) for _, chunks in layer.read_stream(read, 200_000) for chunk in chunks if chunk)
            assert kept <= 200_000
        except (ValueError, TypeError, KeyError) as error:
            assert isinstance(error, ValueError), f"{type(error).__name__}: {error}"


PATHS = ("/v1/sandboxes", "/v1/sandboxes/box", "/v1/sandboxes/box/exec", "/v1/sandboxes/box/files", "/v1/sandboxes/box/folder",
         "/v1/sandboxes/box/fork", "/v1/sandboxes/box/pause", "/v1/sandboxes/box/tunnel/1", "/v1/sandboxes/box/checkpoint",
         "/v1/snapshots/snap-1", "/v1/blobs/x", "/v1/usage", "/v1/commands/x", "/", "/health")  # fmt: skip
BODIES = (b"", b"{}", b'{"argv": ["true"]}', b'{"argv": ["true"], "stream": true}', b'{"spec": {"limits": {"memory_bytes": 1e99}}}',
          b'{"snapshot": "../../x"}', b'{"count": 1e30}', b'{"count": -1}', b'{"name": "\\u0000"}', b'{"driver": null, "spec": []}',
          b'{"keep_memory": "x"}', b'{"spec": {"trees": [1]}}', b'{"spec": {"template": 3}}', b'{"lifetime_seconds": -1}',
          b'{"argv": ["true"], "cwd": "\\u0000"}', b'{"argv": ["true"], "env": {"A\\u0000": "b"}}', b'{"argv": ["\\ud800"]}')  # fmt: skip
QUERIES = (
    "",
    "?path=/etc/passwd",
    "?path=",
    "?path=%00",
    "?path=/a&mode=9",
    "?path=/workspace/f&mode=644",
    "?path=" + "/a" * 3000,
    "?%ff",
)


def well(pool: Pool) -> bool:
    """Whether the sandbox "box" works, once a request that its client did not wait for has done what it wanted with it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if pool.entry("box").sandbox.state is State.PAUSED:
                pool.resume("box")
            with pool.use("box") as box:
                return box.exec(["echo", "well"]).stdout == b"well\n"
        except TransitionError:
            if time.monotonic() > deadline:
                raise


def test_requests_that_are_none_leave_the_service_well(driver, home, count):
    """No answer is a server's fault; in the end a sandbox works as before."""
    api = pytest.importorskip("perilune.sandbox.api", reason="the extra 'serve' is not installed")
    draw = random.Random(7)
    limits = PoolLimits(tick_seconds=3600, wait_seconds=0.0, sandboxes=3, park_seconds=1e6)
    statuses: set[int] = set()
    with Pool(Sandboxes(home, sync="none"), limits) as pool, api.serve_in_thread(pool) as served:
        spec = Spec(limits=Limits(memory_bytes=96 << 20, disk_bytes=16 << 20, processes=32))
        pool.create(spec, driver=driver, name="box")
        port = int(served.url.rpartition(":")[2])
        for _ in range(count(full=10_000, reduced=250)):
            method = draw.choice(("GET", "POST", "POST", "PUT", "PATCH"))
            body = bytearray(draw.choice(BODIES))
            if body and draw.random() < 0.5:
                body[draw.randrange(len(body))] = draw.randrange(256)
            head = f"{method} {draw.choice(PATHS)}{draw.choice(QUERIES)} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            request = bytearray(head.encode() + body)
            if draw.random() < 0.2:
                request[draw.randrange(len(request))] = draw.randrange(256)
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(request)
                    connection.shutdown(socket.SHUT_WR)
                    answer = b""
                    while piece := connection.recv(65536):
                        answer += piece
                    if answer:
                        status = int(answer.split(b" ", 2)[1])
                        statuses.add(status)
                        assert status != 500, (bytes(request), answer)
                        if status >= 400 and b"application/json" in answer:
                            # Where the header that ends the connection was hit, another answer may follow.
                            body = answer.partition(b"\r\n\r\n")[2].decode()
                            assert json.JSONDecoder().raw_decode(body)[0]["error"]["message"]
            for row in pool.records():
                if row["name"] != "box":
                    with contextlib.suppress(PeriluneError):
                        pool.destroy(row["id"])
            if pool.entry("box").sandbox.state.value == "paused":
                pool.resume("box")
        assert well(pool)
    assert {200, 400, 404} <= statuses
