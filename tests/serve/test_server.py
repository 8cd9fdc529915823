"""The server on a real port: an independent client, disconnects, a full queue, stopping, and where it may listen."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import openai
import pytest
from fake_engine import FakeEngine

from perilune.errors import CapacityError, ConfigError
from perilune.http.exposure import check_exposure
from perilune.serve.api import Limits, serve_in_thread

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def test_the_openai_client_reads_answers_streams_and_errors():
    with serve_in_thread(FakeEngine(), api_keys=("secret",)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["fake"]
        answer = client.chat.completions.create(model="fake", **HELLO)
        assert answer.choices[0].message.content == "Hello wörld" and answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens_details.cached_tokens == 3

        chunks = list(
            client.chat.completions.create(model="fake", **HELLO, stream=True, stream_options={"include_usage": True})
        )
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        assert chunks[-1].usage.completion_tokens == 3
        with client.chat.completions.stream(model="fake", **HELLO) as stream:
            assert stream.get_final_completion().choices[0].message.content == "Hello wörld"
        assert client.completions.create(model="fake", prompt=["a", "b"]).choices[1].text == "Hello wörld"

        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.chat.completions.create(model="other", **HELLO)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", **HELLO, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_answer(stream):
    gate = threading.Semaphore(2)
    engine = FakeEngine(pieces=["word "] * 1000, gate=gate)
    with serve_in_thread(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(HELLO | {"stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(head.encode() + body)
            assert engine.started.wait(20)
            if stream:
                assert client.recv(64).startswith(b"HTTP/1.1 200")
        # The connection is closed now. Pieces are handed out one by one until the server has noticed.
        for _ in range(900):
            if engine.stopped.wait(0.01):
                break
            gate.release()
        assert engine.stopped.is_set() and engine.jobs[0].usage.completion_tokens < 1000
        # The worker is free again.
        engine.pieces, engine.gate = ["ok"], None
        assert (
            httpx.post(server.url + "/v1/chat/completions", json=HELLO).json()["choices"][0]["message"]["content"]
            == "ok"
        )


def test_requests_wait_in_line_and_one_too_many_is_told_to_come_back():
    gate = threading.Semaphore(0)
    engine = FakeEngine(pieces=["a", "b"], gate=gate)
    with serve_in_thread(engine, limits=Limits(waiting=2, heartbeat_seconds=0.02)) as server:
        url = server.url + "/v1/chat/completions"
        with (
            httpx.stream("POST", url, json=HELLO | {"stream": True}) as first,
            httpx.stream("POST", url, json=HELLO | {"stream": True}) as second,
        ):
            refused = httpx.post(url, json=HELLO)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "queue_full"
            texts = []
            for response in (first, second):
                lines = response.iter_lines()
                assert ": waiting" in (next(lines) for _ in range(10)), "no heartbeat while nothing is drawn"
                texts.append(lines)
            for _ in range(4):
                gate.release()
            for lines in texts:
                data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                assert "".join(c["choices"][0]["delta"].get("content", "") for c in data) == "ab"


def test_closing_stops_a_running_answer_and_frees_the_port():
    gate = threading.Semaphore(1)
    engine = FakeEngine(pieces=["a"] * 1000, gate=gate)  # closing takes a second of grace, and more on a busy machine
    server = serve_in_thread(engine)
    port = int(server.url.rpartition(":")[2])
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=HELLO | {"stream": True}) as response:
        next(response.iter_lines())
        with pytest.raises(CapacityError, match=f"port {port}"):
            serve_in_thread(engine, port)
        closing = threading.Thread(target=server.close)
        closing.start()
        while closing.is_alive():
            gate.release()
            closing.join(0.01)
    assert engine.jobs[0].closed
    serve_in_thread(FakeEngine(), port).close()


def test_only_this_machine_unless_a_key_is_needed_or_none_is_wanted():
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_exposure(host, (), no_auth=False)
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org", ""):
        with pytest.raises(ConfigError, match="--api-key"):
            check_exposure(host, (), no_auth=False)
        check_exposure(host, ("key",), no_auth=False)
        check_exposure(host, (), no_auth=True)
    with pytest.raises(ConfigError, match="empty"):
        check_exposure("127.0.0.1", ("",), no_auth=False)
    with pytest.raises(ConfigError):
        serve_in_thread(FakeEngine(), host="0.0.0.0")
    with pytest.raises(ConfigError, match="65535"):
        serve_in_thread(FakeEngine(), 70000)
