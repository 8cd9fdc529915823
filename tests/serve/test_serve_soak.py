"""A server that is treated badly: clients that vanish, a full pool, a model that fails. Nothing leaks, nothing is wrong.

Canary prompts are asked all the time; their greedy answers must stay those of a quiet server. `bootstrap.py soak serve_soak`
goes on for half an hour; the suite takes a few rounds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx
import pytest
from tiny_model import tiny_engine

from perilune.serve.api import Limits, serve_in_thread
from perilune.serve.settings import EngineSettings

CANARIES = ["the first canary sings", "a second, quite another canary", "third"]


def body(prompt: str, tokens: int = 8, **more) -> dict:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more


class Rig:
    """A server with a small pool, and what its canaries say when nothing else happens."""

    def __init__(self, *, cache_bytes: int = 0, **limits) -> None:
        # With no bytes asked for there is room for the longest request and a little more: every burst fills it.
        self.engine = tiny_engine(context_length=160, settings=EngineSettings(unit=4, cache_bytes=cache_bytes))
        self.server = serve_in_thread(self.engine, limits=Limits(**limits))
        self.url = self.server.url

    async def __aenter__(self) -> Rig:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits)
        self.truth = [await self.canary(number) for number in range(len(CANARIES))]
        return self

    async def __aexit__(self, *error) -> None:
        await self.client.aclose()
        self.server.close()
        self.engine.close()

    async def canary(self, number: int) -> str | None:
        """What it says when it is asked; None if the server has no room or has just failed."""
        response = await self.client.post("/v1/completions", json=body(CANARIES[number]))
        if response.status_code in (429, 503):
            assert response.headers["retry-after"]
            return None
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    async def quiet(self) -> None:
        """Wait until nothing runs, then look for leaks."""
        until = time.monotonic() + 60
        while (metrics := await asyncio.to_thread(self.engine.metrics)).running + metrics.waiting:
            assert time.monotonic() < until, metrics
            await asyncio.sleep(0.02)
        while len(self.server.context.exchanges):
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        assert metrics.pages_used == 0, f"{metrics.pages_used} pages are held by nobody"
        assert self.engine.admin.check_invariants() == []
        await asyncio.to_thread(self.engine.admin.reset_prefix_cache)
        metrics = await asyncio.to_thread(self.engine.metrics)
        assert metrics.pages_free == metrics.pages_total


async def until_heard(rig: Rig, number: int, seen: Counter) -> str:
    """A canary that comes back whenever it is refused, as clients do."""
    while (song := await rig.canary(number)) is None:
        seen["refused"] += 1
        await asyncio.sleep(0.1)
    return song


async def leave(client: httpx.AsyncClient, prompt: str, events: int) -> str:
    """Read some events of a stream, then close the connection."""
    try:
        async with client.stream("POST", "/v1/completions", json=body(prompt, 40, stream=True)) as response:
            if response.status_code != 200:
                return str(response.status_code)
            async for line in response.aiter_lines():
                events -= line.startswith("data: ")
                if events <= 0:
                    return "left"
            return "done"
    except httpx.HTTPError:
        return "lost"


def test_two_hundred_streams_with_cancels_leave_all_pages_free():
    async def go() -> None:
        async with Rig(cache_bytes=2**24, waiting=400) as rig:
            chance = random.Random(0)
            jobs = [leave(rig.client, f"stream {n}", chance.randint(1, 3)) for n in range(200)]
            seen = Counter(await asyncio.gather(*jobs))
            assert seen["left"] == 200, seen
            await rig.quiet()
            assert [await rig.canary(number) for number in range(3)] == rig.truth

    asyncio.run(go())


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_kills_a_full_pool_and_failures_of_the_model(count, monkeypatch):
    rounds, seen = count(full=1_000_000, reduced=2), Counter()
    until = time.monotonic() + 1800

    async def go() -> None:
        async with Rig(waiting=6) as rig:
            runner = rig.engine.core.runner
            run, failures = runner.run, []

            def fail_sometimes(*arguments):
                if failures:
                    raise failures.pop()
                return run(*arguments)

            monkeypatch.setattr(runner, "run", fail_sometimes)
            chance = random.Random(1)
            for number in range(rounds):
                if time.monotonic() > until:
                    break
                jobs = [
                    leave(rig.client, chance.choice("abcd") * chance.randint(1, 110), chance.choice([0, 1, 3, 999]))
                    for _ in range(chance.randint(8, 20))
                ]
                picks = [chance.randrange(3) for _ in range(4)]
                canaries = [until_heard(rig, pick, seen) for pick in picks]
                work = asyncio.gather(asyncio.gather(*jobs), asyncio.gather(*canaries))
                if number % 2:
                    await asyncio.sleep(chance.uniform(0, 0.3))
                    failures.append(RuntimeError("the device is gone"))
                outcomes, sung = await work
                failures.clear()
                seen.update(outcomes)
                assert sung == [rig.truth[pick] for pick in picks], "a canary sings another song"
                await rig.quiet()
            seen["failed steps"] += (await asyncio.to_thread(rig.engine.metrics)).failed_steps_total
            assert [await rig.canary(number) for number in range(3)] == rig.truth
            assert (await rig.client.get("/ready")).status_code == 200

    asyncio.run(go())
    print(dict(seen))
    # Two rounds may end before any stream does.
    for name in ("left", "done", "429", "refused", "failed steps") if rounds > 2 else ("left", "429"):
        assert seen[name], f"this has proven nothing about {name}: {seen}"
