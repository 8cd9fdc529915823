"""State of a Python session in snapshots: values, definitions, and an arena of which only written pages are read again."""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path

import pytest

from perilune.errors import SandboxError
from perilune.sandbox import Limits, Sandbox, Spec
from perilune.sandbox.guest import arena, layer, session
from perilune.sandbox.protocol import GuestLost
from perilune.sandbox.session import PythonSession

TESTED_DRIVERS = ("proc",)
LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, processes=32, exec_seconds=120)
ARENA = 16 << 20


@pytest.fixture
def box(sandboxes, driver) -> Sandbox:
    if not any(Path(folder, "python3").exists() for folder in ("/usr/bin", "/usr/local/bin")):
        pytest.skip("the host has no python3 that a guest would see")
    return sandboxes.create(Spec(limits=LIMITS), driver=driver)


def begin(box: Sandbox) -> PythonSession:
    return PythonSession(box, arena_bytes=ARENA)


def test_state_goes_on_in_restored_and_forked_sandboxes_to_the_third_generation(box, sandboxes):
    with begin(box) as first:
        assert first.run("import math\nx = {'a': (1, 2.5), 3: {b'z'}}\ndef double(n):\n    return 2 * n").unkept == ()
        assert first.run("block = arena.block('numbers', 1 << 20)\nblock[:5] = b'hello'\nblock[-1] = 7").unkept == (
            "block",
        )
        assert first.run("print('said'); double(21)").value == "42"
    for generation in range(3):
        box = sandboxes.resume(box.checkpoint().id)
        with begin(box) as again:
            reply = again.run("b = arena.block('numbers'); (x, double(4), math.pi > 3, bytes(b[:5]), b[-1], len(b))")
            assert reply.value == str(({"a": (1, 2.5), 3: {b"z"}}, 8, True, b"hello", 7 + generation, 1 << 20)), reply
            again.run(f"b[-1] = {8 + generation}; b[70000] = 1")
    left, right = box.fork(2)
    with begin(left) as one, begin(right) as other:
        one.run("x = 'left'; arena.block('numbers')[0] = 76")
        other.run("x = 'right'")
        assert (one.run("x").value, other.run("x, arena.block('numbers')[0]").value) == ("'left'", "('right', 104)")


def test_errors_leave_the_session_and_say_what_is_not_kept(box):
    with begin(box) as session_:
        assert "ZeroDivisionError" in (session_.run("y = 1\n1 / 0").error or "")
        assert session_.run("y").value == "1"
        assert session_.run("f = open('/etc/passwd'); loop = []; loop.append(loop)").unkept == ("f", "loop")
        assert "SyntaxError" in (session_.run("def").error or "")
        assert "does not fit" in (session_.run("arena.block('huge', 1 << 30)").error or "")
        with pytest.raises(GuestLost, match="has ended"):
            session_.run("import os; os._exit(3)")
    with begin(box) as again:
        assert again.run("y").value == "1", "what whole cells left is kept"
    with pytest.raises(SandboxError, match="did not start"):
        PythonSession(box, python="/no/python")


def test_only_written_pages_are_read_again_and_every_snapshot_is_whole(box, sandboxes, count):
    """Random writes through the map, or past it; each snapshot's arena is compared with the arena as the guest reads it."""
    draw = random.Random(3)
    with begin(box) as running:
        running.run("import os, hashlib\nb = arena.block('b', 8 << 20)\nb[:] = os.urandom(len(b))")
        box.checkpoint()
        sent: list[int] = []
        real = layer.read_stream

        def counted(read, limit):
            for entry, chunks in real(read, limit):
                if entry["path"] == "dev/shm/arena/heap":
                    sent.append(sum(chunk is not None and chunk != layer.SAME for chunk in chunks))
                yield entry, chunks

        layer.read_stream = counted
        try:
            for number in range(count(full=100, reduced=6)):
                places = [draw.randrange(8 << 20) for _ in range(draw.choice((0, 1, 5, 40)))]
                past = number % 5 == 4
                if past:
                    write = f"_ = f.seek({draw.randrange(4 << 20)}), f.write(os.urandom(100))"
                    running.run(f"with open('/dev/shm/arena/heap', 'r+b') as f:\n    {write}")
                else:
                    running.run(f"for at in {places}: b[at] = (b[at] + 1) % 256")
                wanted = running.run("hashlib.sha256(b).hexdigest()").value
                snapshot = box.checkpoint()
                if not running.tracked and not past and number % 3:
                    assert sent[-1] <= len({at // layer.CHUNK for at in places}), (sent, places)
                copy = sandboxes.resume(snapshot.id)
                with begin(copy) as there:
                    look = "import hashlib; hashlib.sha256(arena.block('b')).hexdigest()"
                    assert there.run(look).value == wanted
                copy.destroy()
                if number % 3 == 2:
                    # The snapshots that name the pieces go away: the next one must not count on them.
                    sandboxes.home.store.delete(sandboxes.home.store.snapshots())
        finally:
            layer.read_stream = real
        if running.tracked:
            pytest.skip(f"the kernel does not track writes: {running.tracked}")


def test_a_guest_that_lies_about_its_map_spoils_nothing_else(box, sandboxes):
    lies = ["{", "[]", '{"pid": 1, "start": 0, "size": 4, "serial": 1}', '{"pid": -1, "start": 4096, "size": 65536, "serial": 1}',
            '{"pid": 99999999999999999999, "start": 1e30, "size": null, "serial": "x"}', '{"pid": 2, "start": 4096, "size": 65536, "serial": 1}']  # fmt: skip
    for lie in lies:
        box.write_file("/dev/shm/arena/heap", os.urandom(65536))
        box.write_file("/dev/shm/arena/heap.map", lie.encode())
        for _ in range(2):
            content = os.urandom(65536)
            box.write_file("/dev/shm/arena/heap", content)
            assert sandboxes.resume(box.checkpoint().id).read_file("/dev/shm/arena/heap") == content
    box.exec(
        [
            "sh",
            "-c",
            "rm /dev/shm/arena/*; ln -s /etc/passwd /dev/shm/arena/heap; ln -s /dev/zero /dev/shm/arena/heap.map",
        ]
    )
    box.exec(["sh", "-c", "rm /dev/shm/arena/heap.map; mkfifo /dev/shm/arena/heap.map"])
    assert box.checkpoint().entries > 0


def test_plain_data_comes_back_as_it_was():
    values = [
        None,
        True,
        3,
        -1.5,
        "ä\ud800",
        b"\0\xff",
        bytearray(b"x"),
        (1, [2, {3}]),
        {1: {"a": ()}, (2,): frozenset({4})},
        1 + 2j,
    ]
    for value in values:
        again = session.decoded(session.encoded(value))
        assert again == value and type(again) is type(value)
    for value in (object(), range(3), [open], type):
        with pytest.raises(TypeError):
            session.encoded(value)


def test_a_scan_of_what_is_not_tracked_is_refused(tmp_path):
    """Without the kernel's tracking a file is read whole: the scan must fail, not find nothing."""
    (tmp_path / "arena").mkdir()
    proc, shm = os.open("/proc", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    try:
        tracker = arena.Tracker(proc, [shm], ["dev/shm"])
        buffer = ctypes.create_string_buffer(1 << 16)
        with pytest.raises(OSError):
            tracker._written(os.getpid(), ctypes.addressof(buffer) & ~4095, 1 << 16)
        assert tracker.changed(None) == {} and tracker.changed(1) == {} and tracker.capture == 2
    finally:
        os.close(proc)
        os.close(shm)
