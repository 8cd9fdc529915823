"""Stopping a server: what is told to whom, in which order; and what the admin port can do to a running one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from tiny_model import tiny_engine

from perilune.errors import ConfigError
from perilune.serve.api import Endpoint, Limits, serve_in_thread

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
PROGRAM = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine
from perilune.serve.api import Endpoint, serve

gate = threading.Semaphore(1)
engine = FakeEngine(pieces=["word "] * 4, gate=gate)
def hold():  # one further piece for each line on stdin
    for line in sys.stdin:
        gate.release()
threading.Thread(target=hold, daemon=True).start()
endpoint = Endpoint(port=0, drain_seconds=float(sys.argv[2]))
serve(engine, endpoint, on_ready=lambda url, admin: print(url, flush=True))
print("ended", flush=True)
"""


class Process:
    """A server in a process of its own, in the middle of a streamed answer."""

    def __init__(self, drain_seconds: float) -> None:
        here = os.path.dirname(__file__)
        command = [sys.executable, "-c", PROGRAM, here, str(drain_seconds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.client = httpx.Client(base_url=self.url, timeout=30)
        while True:
            try:
                self.client.get("/health")
                break
            except httpx.ConnectError:
                time.sleep(0.05)

    def more(self, pieces: int) -> None:
        self.process.stdin.write("\n" * pieces)
        self.process.stdin.flush()

    def ask(self):
        return self.client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True})

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        while self.client.get("/ready").status_code != 503:
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.communicate()


def data(lines) -> list[dict]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_sigterm_lets_an_answer_end_and_refuses_new_ones():
    with Process(30) as server, server.ask() as response:
        lines = response.iter_lines()
        next(lines)
        server.signal()
        refused = httpx.post(server.url + "/v1/chat/completions", json=HELLO)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "draining"
        assert httpx.get(server.url + "/health").status_code == 200
        server.more(3)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in data(lines))
        assert text == "word " * 4
        assert server.process.wait(20) == 0 and server.process.stdout.read() == "ended\n"


def test_an_answer_that_does_not_end_in_time_gets_an_error_event():
    with Process(0.2) as server, server.ask() as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert data(lines)[-1]["error"]["code"] == "draining"
        server.more(4)
        assert server.process.wait(20) == 0


def test_a_second_sigterm_stops_at_once():
    with Process(3600) as server, server.ask() as response:
        lines = response.iter_lines()
        next(lines)
        server.signal()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) != 0
        try:
            assert "data: [DONE]" not in list(lines)
        except httpx.HTTPError:
            pass  # the connection is gone


@pytest.fixture(scope="module")
def operated():
    """A real engine behind both ports."""
    engine = tiny_engine()
    with serve_in_thread(engine, admin_port=0, admin_keys=("op",)) as server:
        yield server, httpx.Client(base_url=server.admin_url, headers={"Authorization": "Bearer op"}, timeout=60)
    engine.close()


def test_the_admin_port_needs_its_key_and_its_host(operated):
    server, admin = operated
    assert httpx.get(server.admin_url + "/admin/requests").status_code == 401
    assert httpx.get(server.url + "/admin/requests").status_code == 404, "the API's port has no admin endpoints"
    assert admin.get("/admin/requests", headers={"Host": "evil.example"}).status_code == 403
    with pytest.raises(ConfigError, match="empty"):
        Endpoint(admin_keys=("",)).check()


def test_an_operator_sees_why_a_prompt_hits(operated):
    server, admin = operated
    admin.post("/admin/reset_prefix_cache")
    body = {"prompt": "a long prompt that is asked twice, and more", "max_tokens": 2}
    cold = admin.post("/admin/cache/explain", json={"prompt": body["prompt"]}).json()
    httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    warm = admin.post("/admin/cache/explain", json={"prompt": body["prompt"]}).json()
    assert cold["resume"] == 0 and warm["resume"] > 0 and warm["text"]
    salted = admin.post("/admin/cache/explain", json={"prompt": body["prompt"], "cache_salt": "x"}).json()
    assert salted["resume"] == 0
    again = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == warm["resume"]
    events = admin.get("/admin/cache/timeline").json()["events"]
    assert [event["hit_tokens"] for event in events][-2:] == [0, warm["resume"]]
    kinds = {page["kind"] for page in admin.get("/admin/cache/pages").json()["pages"]}
    assert kinds == {"free", "tokens", "state"}
    pin = admin.post("/admin/cache/pin", json={"prompt": body["prompt"], "seconds": 60}).json()
    assert pin["tokens"] > 0
    assert admin.post("/admin/cache/unpin", json={"name": pin["name"]}).json() == {"unpinned": pin["name"]}
    assert admin.post("/admin/cache/unpin", json={"name": pin["name"]}).status_code == 400
    assert admin.get("/admin/invariants").json() == {"ok": True, "violations": []}
    assert admin.get("/admin/engine").json()["steps_total"] > 0
    assert admin.post("/admin/reset_prefix_cache").json()["freed_pages"] > 0


def test_an_operator_pauses_and_aborts(operated):
    server, admin = operated
    assert admin.post("/admin/pause").json() == {"paused": True}
    assert httpx.get(server.url + "/ready").status_code == 503
    answers = []

    def ask(name: str) -> None:
        answers.append(
            httpx.post(server.url + "/v1/chat/completions", json=HELLO | {"max_tokens": 2}, timeout=60,
                       headers={"X-Request-Id": name})
        )  # fmt: skip

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    while len(admin.get("/admin/requests").json()["requests"]) < 2:
        time.sleep(0.02)
    assert admin.post("/admin/abort", json={}).status_code == 400
    assert admin.post("/admin/abort", json={"request_id": "one"}).json() == {"aborted": 1}
    assert admin.post("/admin/resume").json() == {"paused": False}
    for thread in threads:
        thread.join()
    status = {answer.headers["x-request-id"]: answer.status_code for answer in answers}
    assert status == {"one": 503, "two": 200}


def test_new_weights_of_another_model_are_refused(operated, tmp_path):
    _, admin = operated
    refused = admin.post("/admin/update_weights", json={"path": str(tmp_path), "version": "2"})
    assert refused.status_code == 400 and str(tmp_path) in refused.json()["error"]["message"]
    assert admin.post("/admin/update_weights", json={"version": "2"}).json()["error"]["param"] == "path"


def test_a_client_that_does_not_read_is_let_go():
    """Its answer is large, and it takes nothing: the stream is closed after the time that it has."""

    async def go() -> None:
        engine = FakeEngine(pieces=["x" * 2**20] * 64)
        with serve_in_thread(engine, limits=Limits(client_seconds=0.3)) as server:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            body = json.dumps(HELLO | {"stream": True}).encode()
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n".encode())
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            async with asyncio.timeout(60):
                while not server.context.exchanges:
                    await asyncio.sleep(0.01)
                while server.context.exchanges:
                    await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(go())


def test_a_client_that_does_not_go_on_with_its_request_is_told_and_let_go():
    """So is one that announces more than is taken: at once, before it sends any of it."""

    async def answer(server, length: int, sent: bytes) -> bytes:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        writer.write(sent)
        async with asyncio.timeout(60):
            said = await reader.read()  # to the end of the connection
        writer.close()
        return said

    async def go() -> None:
        with serve_in_thread(FakeEngine(), limits=Limits(client_seconds=0.2)) as server:
            late = await answer(server, 100, b'{"prompt": ')
            assert late.startswith(b"HTTP/1.1 408") and b'"code":"timeout"' in late
        with serve_in_thread(FakeEngine(), limits=Limits(body_bytes=1000)) as server:
            large = await answer(server, 1001, b"")
            assert large.startswith(b"HTTP/1.1 413") and b'"code":"body_too_large"' in large

    asyncio.run(go())
