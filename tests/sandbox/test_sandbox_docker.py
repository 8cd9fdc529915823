"""The docker driver: against an engine where there is one, else against what it says without one; its archives in any case."""

from __future__ import annotations

import io
import os
import signal
import socket
import tarfile
import threading
from pathlib import Path

import pytest
from docker_double import Double, comparable, life, recorded

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox import Limits, Sandbox, Sandboxes, Spec
from perilune.sandbox.drivers.docker_engine import Engine, EngineError, frames
from perilune.sandbox.drivers.docker_layer import as_tar, entry_of
from perilune.sandbox.drivers.docker_machine import DockerMachine, _listed
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import DriverUnavailable, GuestFileError, GuestLost, SecretInSnapshot

TESTED_DRIVERS = ("docker",)
DEADLINE = 60.0
SPEC = Spec(
    limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32, output_bytes=1 << 20, exec_seconds=60)
)


@pytest.fixture
def box(sandboxes: Sandboxes, driver: str) -> Sandbox:
    return sandboxes.create(SPEC, driver=driver)


def test_commands_files_and_errors(box):
    result = box.exec(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0put")
    assert (result.code, result.stdout, result.stderr, result.driver) == (7, b"in\0put", b"err\n", "docker")
    assert box.exec(["no-such-program"]).code == 127 and box.exec(["/etc/passwd"]).code == 126
    data = os.urandom(900_000)
    assert box.exec(["cat"], stdin=data).stdout == data
    box.write_file("/workspace/deep/er/file", data, mode=0o640)
    assert box.read_file("/workspace/deep/er/file") == data
    entry = box.list("/workspace/deep/er")[0]
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("file", "file", 900_000, 0o640)
    with pytest.raises(GuestFileError, match="No such file"):
        box.read_file("/workspace/none")
    with pytest.raises(GuestFileError, match="more than the 100 asked for"):
        box.read_file("/workspace/deep/er/file", max_bytes=100)


def test_a_timeout_ends_what_a_command_started_and_nothing_else(box):
    assert box.exec(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $! > /tmp/other"]).code == 0
    result = box.exec(["sh", "-c", "trap '' TERM; sleep 1001 & (sleep 1001 &) ; echo x; wait"], timeout=1.0)
    assert result.timed_out and result.stdout == b"x\n" and result.signal == 9
    gone = "until test $(cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[1]') = 0; do :; done; kill -0 $(cat /tmp/other)"
    assert box.exec(["sh", "-c", gone], timeout=DEADLINE).code == 0


def test_changes_come_back_to_the_third_generation_and_forks_differ(box, sandboxes):
    script = (
        "mkdir -p /workspace/tree/empty && cd /workspace/tree && printf 'a\\nb' > text && chmod 4751 text && ln -s ../nowhere link && mkfifo pipe\n"
        "head -c 200000 /dev/urandom > big && head -c 100000 /dev/zero > zeros && : > nothing && chmod 1777 empty\n"
        "rm -r /etc/alternatives && mkdir /etc/alternatives && echo mine > /etc/alternatives/mine && rm /bin/vi && echo x >> /etc/passwd\n"
    )
    assert box.exec(["sh", "-c", script]).code == 0
    look = "cd / && find workspace etc -exec stat -c '%n %f %u %s' {} + | grep -v '^etc/[hmr]' | sort; cksum workspace/tree/big; ls -A etc/alternatives; ls bin/vi 2>&1"
    wanted = box.exec(["sh", "-c", look]).stdout
    assert b"mine" in wanted and b"No such file" in wanted
    for _ in range(3):
        snapshot = box.checkpoint()
        box.destroy()
        box = sandboxes.resume(snapshot.id)
        assert box.exec(["sh", "-c", look]).stdout == wanted
    left, right = box.fork(2)
    left.write_file("/workspace/a", b"left")
    assert right.exec(["test", "-e", "/workspace/a"]).code == 1
    box.pause()
    box.resume()
    assert box.exec(["sh", "-c", look]).stdout == wanted


def test_secrets_limits_and_a_container_that_ends(box, sandboxes):
    box.exec(["sh", "-c", "echo $KEY > /workspace/key"], secrets={"KEY": "long-enough-secret"})
    with pytest.raises(SecretInSnapshot, match="/workspace/key holds the secret KEY"):
        box.checkpoint()
    assert (
        b"No such file"
        not in box.exec(
            ["sh", "-c", "i=0; while [ $i -lt 100 ]; do sleep 5 & i=$((i+1)); done; echo done"], timeout=DEADLINE
        ).stderr
    )
    assert box.exec(["sh", "-c", "wget -q -T 2 -O - http://192.0.2.1/"]).code != 0
    machine = box._machine
    assert machine is not None and set(machine.pids()) and box.memory().total > 0
    execution = box.start(["sleep", "1000"])
    os.kill(machine.pids()[0], signal.SIGKILL)
    with pytest.raises(GuestLost):
        execution.result()


def test_ports(box):
    with box.start(
        ["sh", "-c", "echo up; nc -l -p 8123 -e tr a-z A-Z || echo hello | nc -l -p 8123"], timeout=DEADLINE
    ):
        while 8123 not in box.ports():
            pass
        with box.connect(8123) as connection:
            connection.settimeout(DEADLINE)
            connection.sendall(b"hello\n")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100).lower() == b"hello\n"
    with pytest.raises(GuestFileError, match="refused"):
        box.connect(9)


def test_containers_of_a_killed_owner_are_removed_by_the_next(box, sandboxes, home, monkeypatch):
    import perilune.sandbox.drivers.docker as docker

    monkeypatch.setattr(docker, "SETTLED_SECONDS", 0.0)
    name = box._machine.container if box._machine else ""
    engine = sandboxes.driver("docker").engine()
    with Sandboxes(home, sync="none") as other:
        other.driver("docker").engine()
        assert engine.json("GET", f"/containers/{name}/json")["State"]["Running"], "its owner lives"
        os.close(box.record.lock)  # What the kernel does for an owner that is killed.
        box.record.lock = -1
    with Sandboxes(home, sync="none") as other:
        other.driver("docker").engine()
    with pytest.raises(EngineError):
        engine.json("GET", f"/containers/{name}/json")


def test_an_image_that_is_not_there_is_not_pulled(sandboxes, driver):
    with pytest.raises(ConfigError, match="has no image 'no-such-image'; get it first"):
        sandboxes.create(Spec(template="no-such-image"), driver=driver)


def test_without_an_engine_the_probe_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr("perilune.sandbox.drivers.docker_engine.SOCKETS", (str(tmp_path / "none"),))
    with Sandboxes(tmp_path, sync="none") as sandboxes:
        probe = sandboxes.probe("docker")
        assert not probe.passed and "install docker.io or podman" in probe.reason
        with pytest.raises(DriverUnavailable, match="no engine"):
            sandboxes.create(driver="docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    with Sandboxes(tmp_path, sync="none") as sandboxes:
        assert "does not answer" in sandboxes.probe("docker").reason


def test_a_recorded_engine_is_asked_as_it_was_and_its_answers_make_the_same_life(tmp_path, monkeypatch):
    """Without an engine: a life of a sandbox over what a real one has said (20.10); what is sent must be what that one has taken."""
    double = Double(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{double.path}")
    # The recorded container's processes are not here; this one stands for its first.
    monkeypatch.setattr(DockerMachine, "_first_process", lambda machine: os.pidfd_open(os.getpid()))
    with Sandboxes(tmp_path / "home", sync="none") as sandboxes:
        told = life(sandboxes)
        entries = {entry["path"]: entry for entry in sandboxes.home.store.read_layer(told["snapshot"].layer)}
    double.close()
    result = told["result"]
    assert (result.code, result.stdout, result.stderr, result.driver) == (7, b"input", b"err\n", "docker")
    assert told["data"] == bytes(range(256)) and told["again"] == b"text\n" and told["ports"] == []
    assert [(one.name, one.kind, one.mode) for one in told["list"]] == [
        ("data", "file", 0o640),
        ("tree", "folder", 0o755),
    ]
    assert entries["etc/shells"]["type"] == "gone" and entries["workspace/tree/deep"]["type"] == "folder"
    assert {entries[f"workspace/tree/{name}"]["type"] for name in ("file", "hard")} == {"file", "hard"}
    assert entries["workspace/tree/link"]["to"] == "file"

    def changing(method: str, target: str) -> bool:
        return method in ("POST", "PUT", "DELETE") and "/archive" not in target

    sent = [
        (method, target.partition("?")[0], body) for method, target, body in double.requests if changing(method, target)
    ]
    taken = [(one.method, one.kind[1], one.sent) for one in recorded() if changing(one.method, one.target)]
    assert [request[:2] for request in sent] == [request[:2] for request in taken]
    for ours, theirs in zip(sent, taken):
        assert (comparable(ours[2]) if ours[2] else None) == (comparable(theirs[2]) if theirs[2] else None), ours[:2]


def served(answer: bytes, path: Path) -> threading.Thread:
    """An engine that gives one answer to whatever it is asked."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(answer)
        connection.close()
        listener.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b'HTTP/1.1 409 Conflict\r\nContent-Length: 18\r\n\r\n{"message": "busy"}'[:-1] + b"}", "busy"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nOops", "Oops"),
        (b"", "does not answer"),
        (b"\0\1\2", "does not answer"),
    ],
)
def test_what_an_engine_refuses_is_told(tmp_path, answer, says):
    thread = served(answer, tmp_path / "s")
    with pytest.raises(SandboxError, match=says):
        Engine(str(tmp_path / "s")).json("GET", "/version")
    thread.join()


def test_frames_of_a_stream():
    mine, its = socket.socketpair()
    with mine, its:
        its.sendall(b"\1\0\0\0\0\0\0\5hello\2\0\0\0\0\0\0\1!\1\0\0\0\0\0\0\4cut")
        its.shutdown(socket.SHUT_WR)
        assert list(frames(mine)) == [(1, b"hello"), (2, b"!"), (1, b"cut")]


def test_a_layer_becomes_an_archive_and_the_archive_entries(tmp_path):
    content = os.urandom(100_000)
    names = []
    for at in range(0, len(content), layer.CHUNK):
        piece = content[at : at + layer.CHUNK]
        names.append(layer.digest(piece))
        (tmp_path / names[-1][:2]).mkdir(exist_ok=True)
        (tmp_path / names[-1][:2] / names[-1][2:]).write_bytes(piece)
    facts = {"mode": 0o4750, "uid": 3, "gid": 4, "mtime": 5 * 10**9}
    entries = [
        {"path": "a", "type": "folder", **facts}, {"path": "a/big", "type": "file", "size": len(content), "chunks": names, **facts},
        {"path": "a/zeros", "type": "file", "size": 70_000, "chunks": [None, None], **facts},
        {"path": "a/link", "type": "link", "to": "../x", **facts}, {"path": "a/same", "type": "hard", "to": "a/big"},
        {"path": "gone", "type": "gone"}, {"path": "a/pipe", "type": "fifo", **facts},
    ]  # fmt: skip
    found = []
    with tarfile.open(fileobj=io.BytesIO(as_tar(entries, str(tmp_path)))) as file:
        for member in file:
            found.append(entry_of(member.name, member, ""))
            if member.isreg():
                data = file.extractfile(member)
                assert data is not None and data.read() == (content if "big" in member.name else bytes(70_000))
    wanted = [
        {key: value for key, value in entry.items() if key != "chunks"} for entry in entries if entry["type"] != "gone"
    ]
    assert found == wanted
    assert sorted(_listed(b"81a4 5 7\na b\0" + b"41ed 0 8\nc\0")) == [
        ["a b", "file", 5, 0o644, 7 * 10**9],
        ["c", "folder", 0, 0o755, 8 * 10**9],
    ]
