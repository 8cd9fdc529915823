"""A server follows its engine: when a fault has ended it, requests get 503, and the server ends so that it is started again."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fake_engine import FakeEngine
from tiny_model import tiny_engine

from perilune.serve.api import Endpoint, create_app, serve
from perilune.serve.engine import EngineClosed


def asked(engine, method: str, path: str, **more) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(go())


def test_a_closed_engine_is_neither_alive_nor_ready():
    engine = FakeEngine()
    assert asked(engine, "GET", "/health").status_code == 200
    engine.closed = True
    for method, path in (("GET", "/health"), ("GET", "/ready"), ("POST", "/v1/completions")):
        answer = asked(engine, method, path, json={"prompt": "a"} if method == "POST" else None)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "engine_stopped"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_ends_with_its_engine():
    engine = tiny_engine()
    engine.core.scheduler.plan = lambda: 1 / 0
    answers, threads = [], []

    def ask(url: str, _admin: str | None) -> None:
        def go() -> None:
            answers.append(httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=60))

        threads.append(threading.Thread(target=go))
        threads[0].start()

    with pytest.raises(EngineClosed, match="Start the server again"):
        serve(engine, Endpoint(port=0), on_ready=ask)
    threads[0].join()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_stopped"
