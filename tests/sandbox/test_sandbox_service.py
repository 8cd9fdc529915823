"""The HTTP service and its clients: the same calls and the same typed errors as in process, keys, limits, streams both ways."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perilune.errors import CapacityError, ConfigError, SandboxError
from perilune.sandbox import AsyncSandboxes, Limits, RemoteSandboxes, Sandboxes, Spec, State
from perilune.sandbox.pool import Pool, PoolLimits
from perilune.sandbox.protocol import (
    GuestFileError,
    GuestLost,
    Mismatch,
    NoSuchSandbox,
    SecretInSnapshot,
    StoreFull,
    TransitionError,
)
from perilune.sandbox.wire_errors import field_of, name_of, rebuilt

api = pytest.importorskip("perilune.sandbox.api", reason="the extra 'serve' is not installed")

TESTED_DRIVERS = ("proc",)
SPEC = Spec(
    limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, processes=32, output_bytes=1 << 20, exec_seconds=60)
)
KEY = "a-key-of-this-test"
DEADLINE = 30.0


@pytest.fixture
def serve(driver, home: Path) -> Iterator[Callable[..., RemoteSandboxes]]:
    opened: list = []

    def one(*, key: str | None = KEY, pool_limits: dict | None = None, **options) -> RemoteSandboxes:
        limits = PoolLimits(**{"tick_seconds": 3600.0, "wait_seconds": 0.0, **(pool_limits or {})})
        pool = Pool(Sandboxes(home, sync="none"), limits)
        handle = api.serve_in_thread(pool, api_keys=(KEY,), **options)
        opened.extend((pool, handle))
        return RemoteSandboxes(handle.url, key)

    yield one
    for thing in reversed(opened):
        thing.close()


@pytest.fixture
def remote(serve) -> RemoteSandboxes:
    return serve()


@pytest.fixture
def box(remote, driver):
    return remote.create(SPEC, driver=driver, name="box")


def raw(remote: RemoteSandboxes, method: str, path: str, body: bytes = b"", headers: dict | None = None):
    connection = http.client.HTTPConnection(remote.connection.url.removeprefix("http://"), timeout=DEADLINE)
    connection.request(method, path, body, {**remote.connection.headers, **(headers or {})})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_streams_exit_code_and_what_the_driver_promises(box, driver):
    outputs = []
    result = box.exec(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0put", on_output=outputs.append)
    assert (result.code, result.stdout, result.stderr) == (7, b"in\0put", b"err\n")
    assert sorted(output.stream for output in outputs) == ["stderr", "stdout"]
    assert (
        result.driver == driver and {"isolation"} <= {one.name for one in result.guarantees} and result.peak_bytes > 0
    )
    assert box.exec(["no-such-program"]).code == 127
    assert box.exec(["sh", "-c", "kill -9 $$"]).signal == 9


def test_large_input_and_output_pass_unchanged(box):
    data = os.urandom(900_000)
    assert box.exec(["cat"], stdin=data).stdout == data
    dropped = box.exec(["sh", "-c", "head -c 3000000 /dev/zero"])
    assert (len(dropped.stdout), dropped.stdout_bytes, dropped.truncated) == (1 << 20, 3_000_000, True)


def test_input_goes_on_while_output_comes(box):
    read, write = os.pipe()
    execution = box.start(["sh", "-c", "read a; echo got $a; read b; echo got $b"], stdin=read, timeout=DEADLINE)
    try:
        os.write(write, b"one\n")
        assert next(iter(execution)).data == b"got one\n"
        os.write(write, b"two\n")
        assert execution.result().stdout == b"got one\ngot two\n"
    finally:
        os.close(read)
        os.close(write)


def test_a_killed_command_has_a_result_and_a_left_one_is_ended(box, remote):
    execution = box.start(["sleep", "1000"])
    execution.kill()
    assert execution.result().signal == 9
    execution.kill()  # It has ended: nothing happens.
    left = box.start(["sh", "-c", "echo $$ > /workspace/pid; echo up; sleep 1000"])
    assert next(iter(left)).data == b"up\n"
    left.close()
    result = box.exec(["sh", "-c", "while kill -0 $(cat /workspace/pid) 2> /dev/null; do :; done"], timeout=DEADLINE)
    assert not result.timed_out
    deadline = time.monotonic() + DEADLINE
    while remote.usage()["commands"] and time.monotonic() < deadline:
        pass
    assert remote.usage()["commands"] == 0


def test_a_command_with_a_timeout(box):
    result = box.exec(["sh", "-c", "trap '' TERM; echo x; sleep 1000"], timeout=0.3)
    assert result.timed_out and result.stdout == b"x\n" and result.signal == 9


def test_files_and_folders(box):
    data = os.urandom(200_001)
    box.write_file("/workspace/deep/ä b", data, mode=0o640)
    assert box.read_file("/workspace/deep/ä b") == data
    entry = box.list("/workspace/deep")[0]
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("ä b", "file", 200_001, 0o640)
    with pytest.raises(GuestFileError, match="No such file"):
        box.read_file("/workspace/none")
    with pytest.raises(GuestFileError, match="more than the 100 asked for"):
        box.read_file("/workspace/deep/ä b", max_bytes=100)


def test_ports(remote, driver):
    if not any(Path(folder, "python3").exists() for folder in ("/usr/bin", "/usr/local/bin")):
        pytest.skip("the host has no python3 that a guest would see")
    box = remote.create(SPEC, driver=driver)
    server = (
        "import socket; s = socket.create_server(('127.0.0.1', 8123)); print('up', flush=True)\n"
        "while True:\n c, _ = s.accept()\n d = b''\n while p := c.recv(65536): d += p\n c.sendall(d.upper()); c.close()"
    )
    with box.start(["python3", "-S", "-c", server], timeout=DEADLINE) as execution:
        assert next(iter(execution)).data == b"up\n"
        assert box.ports() == [8123]
        for size in (5, 300_000):
            with box.connect(8123) as connection:
                connection.settimeout(DEADLINE)
                connection.sendall(b"h" * size)
                connection.shutdown(socket.SHUT_WR)
                received = b""
                while piece := connection.recv(65536):
                    received += piece
                assert received == b"H" * size
        with pytest.raises(GuestFileError, match="refused"):
            box.connect(9)


def test_saving_forking_pausing_and_resuming(box, remote):
    box.write_file("/workspace/a", b"1")
    snapshot = box.checkpoint()
    first, second = box.fork(2)
    first.write_file("/workspace/a", b"2")
    assert box.read_file("/workspace/a") == second.read_file("/workspace/a") == b"1"
    saved = box.pause()
    assert saved is not None and box.state is State.PAUSED and box.snapshot == saved.id
    with pytest.raises(TransitionError, match="paused"):
        box.exec(["true"])
    box.resume()
    assert box.state is State.RUNNING and box.read_file("/workspace/a") == b"1"
    assert box.pause(keep_memory=True) is None
    box.resume()
    again = remote.resume(snapshot.id, name="again")
    assert again.read_file("/workspace/a") == b"1" and again.generation != box.generation
    assert {row["id"] for row in remote.saved()} >= {snapshot.id, saved.id}
    again.destroy()
    again.destroy()
    assert remote.remove([snapshot.id, "box"]) >= 0
    with pytest.raises(NoSuchSandbox):
        remote.open("box")
    with pytest.raises(NoSuchSandbox, match="no sandbox or snapshot"):
        remote.remove([snapshot.id])


def test_errors_are_the_ones_of_a_call_in_process(box, remote, driver):
    with pytest.raises(SandboxError, match="there is a sandbox 'box' already"):
        remote.create(SPEC, driver=driver, name="box")
    with pytest.raises(ConfigError, match="is not one of"):
        remote.create(SPEC, driver="teleport")
    with pytest.raises(ConfigError, match="above zero"):
        remote.connection.json("POST", "/v1/sandboxes", {"spec": {"limits": {"memory_bytes": -1}}})
    with pytest.raises(NoSuchSandbox, match="no sandbox 'other'"):
        remote.open("other")
    box.exec(["sh", "-c", "echo $KEY > /workspace/key"], secrets={"KEY": "long-enough-secret"})
    with pytest.raises(SecretInSnapshot, match="/workspace/key holds the secret KEY"):
        box.checkpoint()
    with pytest.raises(SandboxError, match="cannot be reached"):
        RemoteSandboxes("http://127.0.0.1:9").records()
    with pytest.raises(ConfigError, match="no URL"):
        RemoteSandboxes("localhost:80")


def test_typed_errors_come_back_as_they_went():
    for error in (
        TransitionError("a", State.PAUSED, State.PAUSED), GuestLost("x"), StoreFull("full"), Mismatch("weights", 1, 2, "step 3"),
        CapacityError("c"), ConfigError("f"),
    ):  # fmt: skip
        again = rebuilt(name_of(error), str(error), field_of(error))
        assert type(again) is type(error) and str(again) == str(error)
    assert rebuilt("Mismatch", "m", "weights").field == "weights"  # type: ignore[attr-defined]
    assert type(rebuilt("SystemExit", "no")) is SandboxError


def test_a_guest_that_ends_under_a_command_is_a_typed_error(remote, driver):
    box = remote.create(SPEC, driver=driver)
    execution = box.start(["sh", "-c", "echo up; sleep 1000"])
    assert next(iter(execution)).data == b"up\n"
    remote.connection.request("DELETE", f"/v1/sandboxes/{box.id}")
    with pytest.raises(SandboxError):
        execution.result()


def test_keys(serve):
    remote = serve()
    for key in (None, "wrong", KEY + "x"):
        headers = {"Authorization": f"Bearer {key}"} if key else {"Authorization": ""}
        for method, path in (("GET", "/v1/sandboxes"), ("POST", "/v1/sandboxes"), ("POST", "/v1/sandboxes/x/exec"), ("GET", "/v1/usage"),
                             ("GET", "/v1/blobs/" + "0" * 64), ("DELETE", "/v1/snapshots/snap-1"), ("GET", "/v1/snapshots/snap-1/record")):  # fmt: skip
            answer, content = raw(remote, method, path, b"{}", headers)
            assert answer.status == 401 and json.loads(content)["error"]["code"] == "invalid_api_key", (method, path)
    assert raw(remote, "GET", "/health", headers={"Authorization": ""})[0].status == 200
    page, content = raw(remote, "GET", "/", headers={"Authorization": ""})
    assert page.status == 200 and b"<title>perilune sandboxes" in content and "default-src 'none'" in str(page.headers)
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert raw(remote, "GET", "/v1/sandboxes", headers=headers)[0].status == 403


def test_another_address_needs_a_key():
    """Before anything listens; `tests/serve/test_server.py` has the whole table of addresses."""
    with pytest.raises(ConfigError, match="can be reached by other machines"):
        api.serve_in_thread(None, host="0.0.0.0")
    with pytest.raises(ConfigError, match="is empty"):
        api.serve_in_thread(None, api_keys=(" ",))


def test_limits_and_request_ids(serve, driver):
    remote = serve(
        limits=api.ServiceLimits(body_bytes=1000, file_bytes=2000, commands=1),
        pool_limits={"sandboxes": 1, "park_seconds": 1e6},
    )
    box = remote.create(SPEC, driver=driver)
    answer, content = raw(remote, "POST", "/v1/sandboxes", b"x" * 1001)
    assert answer.status == 413 and json.loads(content)["error"]["code"] == "body_too_large"
    assert raw(remote, "PUT", f"/v1/sandboxes/{box.id}/files?path=/a", b"x" * 2001)[0].status == 413
    running = box.start(["sleep", "1000"])
    with pytest.raises(CapacityError, match="1 commands and connections are open, and 1 may"):
        box.exec(["true"])
    running.kill()
    running.result()
    answer, content = raw(remote, "POST", "/v1/sandboxes", b"{}", {"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["Retry-After"], answer.headers["X-Request-Id"]) == (429, "1", "mine")
    assert json.loads(content)["error"]["type"] == "CapacityError"
    assert len(raw(remote, "GET", "/nothing")[0].headers["X-Request-Id"]) == 32


def test_what_of_the_host_a_client_may_ask_for(serve, driver, tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "in").mkdir(parents=True)
    other.mkdir()
    (allowed / "link").symlink_to(other)
    remote = serve(permissions=api.Permissions(trees=(str(allowed),)))
    assert remote.create(Spec(trees=(str(allowed / "in"),)), driver=driver).exec(["ls", str(allowed / "in")]).code == 0
    for tree in (str(other), str(allowed / "link"), f"{allowed}/../other", "/"):
        with pytest.raises(ConfigError, match="may not be shown here"):
            remote.create(Spec(trees=(tree,)), driver=driver)
    with pytest.raises(ConfigError, match="may not be used here"):
        remote.create(Spec(template="/"), driver=driver)
    # Every image of a container engine would be a way to its data: only those that are named.
    named = api.Permissions(images=("debian:12",))
    named.check(Spec(template="debian:12"), "docker")
    named.check(Spec(), "docker")
    api.Permissions().check(Spec(template="python"), "qemu")
    for template in ("debian:11", "ghcr.io/x/y", "/"):
        with pytest.raises(ConfigError, match="may not be used here"):
            named.check(Spec(template=template), "docker")
    with pytest.raises(ConfigError, match="network 'host' is not allowed here"):
        remote.create(Spec(network="host"), driver=driver)


def test_a_plain_client_gets_one_json_object(box, remote):
    answer, content = raw(remote, "POST", "/v1/sandboxes/box/exec", b'{"argv": ["cat"]}\nhello')
    result = json.loads(content)
    assert answer.status == 200 and (result["stdout"], result["code"], result["truncated"]) == ("hello", 0, False)
    answer, content = raw(remote, "POST", "/v1/sandboxes/box/exec", b'{"argv": ["printf", "\\\\377"]}')
    assert json.loads(content)["stdout_base64"] == "/w=="


BAD = [
    (b"", "argv"), (b"[]", "object"), (b"{", "truncated"), (b'{"argv": "ls"}', "array"), (b'{"argv": ["ls"], "uid": 0}', "uid"),
    (b'{"argv": []}', "program"), (b'{"argv": ["a\\u0000"]}', "NUL"), (b'{"argv": ["ls"], "env": {"": "x"}}', "name"),
    (b'{"argv": ["ls"], "timeout": -1}', "above zero"), (b'{"argv": ["ls"], "terminal": true}', "stream"), (b"\xff\xfe", "JSON"),
    (b"[" * 5000, "JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), BAD, ids=range(len(BAD)))
def test_a_bad_command_is_refused_with_a_reason(box, remote, body, says):
    answer, content = raw(remote, "POST", "/v1/sandboxes/box/exec", body)
    assert answer.status == 400 and says in json.loads(content)["error"]["message"]


def test_an_event_loop_uses_a_service(remote, driver):
    async def work() -> None:
        async with AsyncSandboxes(over=remote) as sandboxes:
            box = await sandboxes.create(SPEC, driver=driver)
            await box.write_file("/workspace/a", b"x")
            results = await asyncio.gather(*(box.exec(["cat", "/workspace/a"]) for _ in range(3)))
            assert [result.stdout for result in results] == [b"x"] * 3
            async for output in box.stream(["sh", "-c", "echo up; sleep 1000"]):
                assert output.data == b"up\n"
                break
            task = asyncio.ensure_future(box.exec(["sh", "-c", "echo $$ > /workspace/pid; sleep 1000"]))
            while (await box.exec(["test", "-s", "/workspace/pid"])).code:
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gone = "while kill -0 $(cat /workspace/pid) 2> /dev/null; do :; done"
            assert not (await box.exec(["sh", "-c", gone], timeout=DEADLINE)).timed_out
            await box.destroy()

    asyncio.run(asyncio.wait_for(work(), 2 * DEADLINE))


def test_a_terminal_over_the_service(remote, box):
    script = "stty size; read line; echo got $line; stty size; exit 5"
    process = box.terminal(["sh", "-c", script], size=(33, 101))
    try:
        said = b""
        sent = False
        while b"got hello\r\n40 99" not in said:
            said += os.read(process.terminal, 4096)
            if b"33 101" in said and not sent:
                process.resize(40, 99)
                os.write(process.terminal, b"hello\n")
                sent = True
        assert process.finish()["code"] == 5
        with pytest.raises(OSError, match="no command .* runs"):
            process.resize(40, 100)
    finally:
        process.close()
    with box.start(["sleep", "1000"]) as execution:
        answer, content = raw(remote, "PUT", f"/v1/commands/{execution._command}/window", b'{"rows": 1, "columns": 2}')
        assert answer.status == 400 and b"has no terminal" in content
    for body in (b'{"rows": 0, "columns": 2}', b'{"rows": 1, "columns": 70000}', b'{"rows": 1}'):
        assert raw(remote, "PUT", "/v1/commands/x/window", body)[0].status == 400, body


def test_parked_sandboxes_wake_at_a_request(serve, driver, home):
    remote = serve(pool_limits={"sandboxes": 1, "park_seconds": 0.0})
    first = remote.create(SPEC, driver=driver)
    first.write_file("/workspace/a", b"kept")
    second = remote.create(SPEC, driver=driver)
    assert {row["id"]: row["state"] for row in remote.records()} == {first.id: "parked", second.id: "running"}
    assert first.read_file("/workspace/a") == b"kept"
    assert {row["id"]: row["state"] for row in remote.records()} == {first.id: "running", second.id: "parked"}


def test_snapshots_can_be_fetched_by_hash(box, remote, home):
    box.write_file("/workspace/a", os.urandom(100_000))
    snapshot = box.checkpoint()
    record = remote.connection.request("GET", f"/v1/snapshots/{snapshot.id}/record")
    assert json.loads(record.split(b"\n")[0])["id"] == snapshot.id
    layer = remote.connection.request("GET", f"/v1/blobs/{snapshot.layer}")
    assert layer == (home / "store/blobs" / snapshot.layer[:2] / snapshot.layer[2:]).read_bytes()
    for name in ("..%2f..%2fusage", "0" * 63, "G" * 64):
        assert raw(remote, "GET", f"/v1/blobs/{name}")[0].status in (400, 404)
    assert raw(remote, "GET", "/v1/snapshots/snap-..%2f..%2fx/record")[0].status in (404, 409)


def test_many_clients_at_once(remote, driver, count):
    failures: list[BaseException] = []
    turns = count(full=50, reduced=3)

    def client(number: int) -> None:
        try:
            box = remote.create(SPEC, driver=driver, name=f"c{number}")
            for turn in range(turns):
                box.write_file("/workspace/n", f"{number}-{turn}".encode())
                assert box.exec(["cat", "/workspace/n"]).stdout == f"{number}-{turn}".encode()
                fork = box.fork(1)[0]
                assert fork.read_file("/workspace/n") == f"{number}-{turn}".encode()
                fork.destroy()
            box.destroy()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and remote.records() == []
