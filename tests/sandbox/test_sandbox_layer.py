"""Layers and messages between host and guest: round trips, and anything else is refused before it can do harm."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.sandbox.guest import layer, wire
from perilune.sandbox.store import Store

FILE = {"type": "file", "mode": 0o644, "uid": os.getuid(), "gid": os.getgid(), "mtime": 0}
FOLDER = {"type": "folder", "mode": 0o755, "uid": os.getuid(), "gid": os.getgid(), "mtime": 0}


def streamed(folder, tree: str = "") -> bytes:
    data = io.BytesIO()
    fd = os.open(folder, os.O_RDONLY)
    try:
        layer.stream([fd], [tree], data.write)
    finally:
        os.close(fd)
    return data.getvalue()


def exactly(data: bytes):
    stream = io.BytesIO(data)

    def read(count: int) -> bytes:
        found = stream.read(count)
        if len(found) != count:
            raise ValueError("short")
        return found

    return read


def test_a_file_of_zeros_and_holes_crosses_without_its_zeros(tmp_path):
    content = bytes(layer.CHUNK) + b"x" + bytes(layer.CHUNK * 2) + b"tail"
    (tmp_path / "a").write_bytes(content)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(50 << 20)
    data = streamed(tmp_path)
    assert len(data) < 4 * layer.CHUNK
    found = {entry["path"]: chunks for entry, chunks in layer.read_stream(exactly(data), 1 << 30)}
    assert b"".join(chunk or layer.ZEROS for chunk in found["a"][:-1]) + (found["a"][-1] or b"") == content
    assert set(found["sparse"]) == {None}


def test_hard_links_links_and_pipes(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_bytes(b"1")
    os.link(tmp_path / "d/a", tmp_path / "d/b")
    (tmp_path / "d/l").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "d/p")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "d/s"))
        kinds = {e["path"]: (e["type"], e.get("to")) for e, _ in layer.read_stream(exactly(streamed(tmp_path)), 99)}
    assert kinds == {"d": ("folder", None), "d/a": ("file", None), "d/b": ("hard", "d/a"), "d/l": ("link", "/etc/passwd"),
                     "d/p": ("fifo", None)}  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../up", "a//b", "", ".", "a/.", "nul\0", "a/"]
)  # fmt: skip
def test_a_path_that_leaves_the_root_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="leaves the root"):
        layer.check({**FILE, "path": path, "size": 0})
    with pytest.raises(ValueError, match="leaves the root"):
        layer.restore([{**FILE, "path": path, "size": 0, "chunks": []}], [str(tmp_path)], [""], "")
    assert list(tmp_path.iterdir()) == []


def test_a_layer_cannot_write_through_its_own_links(tmp_path):
    """A guest cannot make such a layer; one who can write into the store could."""
    outside, upper = tmp_path / "outside", tmp_path / "upper"
    outside.mkdir()
    upper.mkdir()
    link = {**FILE, "type": "link", "path": "a", "to": str(outside)}
    for second in (
        {**FILE, "path": "a/b", "size": 0, "chunks": []},
        {**FOLDER, "path": "a/b"},
        {"type": "hard", "path": "c", "to": "a/b"},
        {**FILE, "path": "a", "size": 0, "chunks": []},
    ):
        with contextlib.suppress(FileNotFoundError):
            (upper / "a").unlink()
        with pytest.raises((ValueError, OSError)):
            layer.restore([link, second], [str(upper)], [""], "")
        assert list(outside.iterdir()) == []


def test_a_restore_reads_only_whole_blobs(tmp_path):
    store = Store(tmp_path / "store", sync="none")
    with store.writing() as batch:
        name = batch.put(b"content")
    entry = {**FILE, "path": "a", "size": 7, "chunks": [name]}
    for number, (change, message) in enumerate(
        [
            ({}, None),
            ({"size": 6}, "truncated"),
            ({"chunks": []}, "add up"),
            ({"chunks": ["../../etc/passwd"]}, "no blob's name"),
        ]
    ):
        upper = tmp_path / str(number)
        upper.mkdir()
        restoring = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
        with restoring:
            layer.restore([{**entry, **change}], [str(upper)], [""], str(store.root / "blobs"))
    assert (tmp_path / "0/a").read_bytes() == b"content"
    store.blob_path(name).write_bytes(b"CONTENT")
    (tmp_path / "corrupt").mkdir()
    with pytest.raises(ValueError, match=f"blob {name} is corrupt"):
        layer.restore([entry], [str(tmp_path / "corrupt")], [""], str(store.root / "blobs"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
entries = st.dictionaries(
    st.sampled_from(["path", "type", "to", "size", "mode", "uid", "gid", "mtime", "chunks"]),
    json_values | st.sampled_from(["file", "folder", "link", "hard", "a", "a/b", "../x"]),
)


@example([{"path": "a", "type": "hard"}], b"")
@given(st.lists(entries | json_values, max_size=4), st.binary(max_size=40))
def test_a_stream_of_anything_is_a_value_error_or_entries(items, tail):
    data = (
        b"".join(struct.pack("!I", len(body)) + body for body in (json.dumps(item).encode() for item in items)) + tail
    )
    try:
        for entry, chunks in layer.read_stream(exactly(data), 1 << 20):
            layer.check(entry)
            assert sum(len(chunk or b"") for chunk in chunks) <= 1 << 20
    except (ValueError, RecursionError):
        pass


@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_packet_is_a_message_or_malformed_and_leaks_no_descriptor(data, count):
    left, right = wire.pair()
    with left, right:
        before = len(os.listdir("/proc/self/fd"))
        fd = os.open("/dev/null", os.O_RDONLY)
        try:
            socket.send_fds(left, [data or b"x"], [fd] * count) if count else left.send(data or b"x")
        finally:
            os.close(fd)
        try:
            message = wire.receive(right)
            assert message is not None and isinstance(message[0], dict)
            for received in message[1]:
                os.close(received)
        except wire.Malformed:
            pass
        assert len(os.listdir("/proc/self/fd")) == before


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=4), st.integers(0, 200_000))
def test_messages_short_and_long_arrive_as_sent(message, padding):
    message["padding"] = "p" * padding
    left, right = wire.pair()
    with left, right, open("/dev/null") as file:
        wire.send(left, message, [file.fileno()])
        found = wire.receive(right)
        assert found is not None and found[0] == message and len(found[1]) == 1
        os.close(found[1][0])
        left.close()
        assert wire.receive(right) is None
