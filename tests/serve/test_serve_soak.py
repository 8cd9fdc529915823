"""A server that is treated badly: clients that vanish, a full pool, a full disk, a model and an engine that fail.

Nothing leaks, nothing is wrong, whoever is refused is told why, and a server that starts again finds its disk tier.
`bootstrap.py soak serve_soak` goes on for half an hour; the suite takes a round in each of two lives of the server.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from soak_client import ask
from soak_rig import PATIENCE, Clients, Corpus, Server, holds, outcome, until_heard
from soak_server import DISK_BYTES
from tiny_model import tiny_engine

from perilune.serve.api import Limits, serve_in_thread
from perilune.serve.settings import EngineSettings


def test_two_hundred_streams_with_cancels_leave_all_pages_free():
    """Half of the clients leave after a word or three, the others hear everything."""
    engine = tiny_engine(context_length=160, settings=EngineSettings(unit=4, cache_bytes=2**24))

    async def go(url: str) -> Counter:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
            jobs = (leave(client, f"stream {n}", n % 3 + 1 if n % 2 else 99) for n in range(200))
            return Counter(await asyncio.gather(*jobs))

    with serve_in_thread(engine, limits=Limits(waiting=400)) as server:
        assert asyncio.run(go(server.url)) == {"left": 100, "heard": 100}
        until = time.monotonic() + PATIENCE
        while (counts := engine.metrics()).running + counts.waiting + len(server.context.exchanges):
            assert time.monotonic() < until, counts
            time.sleep(0.02)
        assert counts.pages_used == 0 and engine.admin.check_invariants() == []
        engine.admin.reset_prefix_cache()
        counts = engine.metrics()
        assert counts.pages_free == counts.pages_total
    engine.close()


async def leave(client: httpx.AsyncClient, prompt: str, events: int) -> str:
    """Read so many events of a stream, then close the connection."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events -= line.startswith("data: {")
            if events <= 0:
                return "left"
            if line == "data: [DONE]":
                return "heard"
    return "lost"


ENDINGS = ("term", "term busy", "kill busy", "engine busy")
"""How a life of the server ends: told to, when quiet or in the middle of its work; killed; by a fault of its engine."""


class Soak:
    """Clients, canaries and faults, round by round, through the lives of a server.

    Args:
        folder: of the disk tier.
        corpus: what is asked.
        seed: of everything that is drawn here; what meets what is up to the machine.

    Attributes:
        seen: how often what happened.
        memory: of each life, what it had at the end of each round, in MiB.
    """

    def __init__(self, folder: Path, corpus: Corpus, seed: int) -> None:
        self.folder, self.corpus, self.chance = folder, corpus, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.memory: list[list[float]] = []
        self.server = self._start()

    def _start(self) -> Server:
        self.memory.append([])
        self.counts = None  # of the engine, in its last quiet moment
        overlap = (len(self.memory) - 1) // len(ENDINGS) % 2 == 1  # the last and longest, and some that end in each way
        self.seen["lives that plan ahead"] += overlap
        return Server(self.folder, overlap=overlap)

    def live(self, seconds: float, ending: str) -> None:
        """A life of the server: rounds for so long, at least one; then its end, and the start of the next."""
        until = time.monotonic() + seconds
        while True:
            last = time.monotonic() >= until
            self.round(ending if last and ending != "term" else "")
            if last:
                break
        if ending == "term":
            self.stop_and_find_again()

    def round(self, ending: str = "") -> None:
        """Some processes of clients, some killed; canaries; a fault; then all is quiet, or the server ends meanwhile."""
        chance, seen, server = self.chance, self.seen, self.server
        clients = [Clients(server.url, self.corpus, chance) for _ in range(chance.randint(3, 6))]
        canaries = [Canary(self, chance.randrange(len(self.corpus.prompts))) for _ in range(3)]
        fault = chance.choice(("step", "step", "no-disk", "stop", ""))
        time.sleep(chance.uniform(0, 0.6))  # the canaries have come, the clients come one after the other
        if fault in ("step", "no-disk"):
            server.fail(fault)
        victims = chance.sample(clients, len(clients) // 2)
        if fault == "stop":  # it reads nothing for a while
            victims[0].process.send_signal(signal.SIGSTOP)
        for victim in victims:
            time.sleep(chance.uniform(0, 0.3))
            counts = server.admin("engine")
            seen["moments with a full pool"] += counts["pages_free"] == 0
            seen["moments with requests that wait"] += counts["waiting"] > 0
            victim.process.kill()
            seen["clients killed"] += 1
        if ending:
            self.end(ending)
        allowed = ("done", "503 engine_failed", "event engine_failed", "429 queue_full")
        if ending:
            allowed += ("lost", "503 draining", "event draining", "503 engine_stopped", "event engine_stopped")
        for client in clients:
            for what in client.outcomes():
                assert client in victims or what in allowed, (what, self.server.last_words())
                seen[what] += client not in victims
            seen["requests"] += len(client.asked)
        for canary in canaries:
            canary.join()
        if not ending:
            server.fail("disk")
            self._look_for_leaks()

    def _look_for_leaks(self) -> None:
        counts = self.server.quiet()
        self.counts = counts
        assert holds(self.folder), f"{len(list(self.folder.iterdir()))} files are more than the disk tier may have"
        self.seen["rounds"] += 1
        self.seen["rounds with a full disk tier"] += counts["tiers"]["disk_bytes"] > 0.8 * DISK_BYTES
        if sys.platform == "linux":
            threads, memory = self.server.threads_and_memory()
            files = self.server.open_files()
            if not self.memory[-1]:
                self._first = threads, files
            assert threads <= self._first[0] + 4 and files <= self._first[1] + 4, (
                f"{threads} threads, {files} files open"
            )
            self.memory[-1].append(memory)

    def end(self, ending: str) -> None:
        """End the server in the middle of its work, and start another one."""
        old = self.server
        if ending == "kill busy":
            old.process.kill()
        else:
            if ending == "term busy":
                old.process.send_signal(signal.SIGTERM)
            else:
                old.fail("engine")
            until = time.monotonic() + PATIENCE
            while old.process.poll() is None:  # who comes now is told so, or has the engine plan the step that fails
                assert time.monotonic() < until, old.last_words()
                self.seen[outcome(ask(old.url, "/v1/completions", self.corpus.body(0)))] += 1
                time.sleep(0.01)
        code = old.end()
        assert code == {"kill busy": -signal.SIGKILL, "term busy": 0, "engine busy": 1}[ending], old.last_words()
        self._bury(old, ending)
        self.server = self._start()
        assert self.server.admin("engine")["tiers"]["disk_prefixes"] > 0, "the disk tier has not outlived its server"

    def stop_and_find_again(self) -> None:
        """Stop a quiet server; the next one hits what the last one has answered to a session, which is kept longest."""
        number = self.chance.randrange(len(self.corpus.prompts))
        refused: list[str] = []
        until_heard(lambda: self.server.url, self.corpus, number, refused, session_id="the last")
        self.server.process.send_signal(signal.SIGTERM)
        assert self.server.end() == 0, self.server.last_words()
        self._bury(self.server, "term")
        self.server = self._start()
        heard = until_heard(lambda: self.server.url, self.corpus, number, refused)
        assert not refused and heard["cached"] > 0, heard
        assert self.server.admin("engine")["tiers"]["disk_hits_total"] == 1
        self.seen["hits after a restart"] += 1

    def _bury(self, server: Server, ending: str) -> None:
        """Count what a life has seen, as of its last quiet moment."""
        self.seen[f"ended by {ending}"] += 1
        words = server.last_words()
        told = "an injected fault of the engine" in words
        assert ending == "engine busy" if told else "Traceback" not in words, words
        if (counts := self.counts) is None:
            return
        self.seen["failed steps"] += counts["failed_steps_total"]
        self.seen["preempted"] += counts["preempted_total"]
        self.seen["tokens drawn"] += counts["generated_tokens_total"]
        self.seen["prompt tokens"] += counts["prompt_tokens_total"]
        self.seen["prompt tokens skipped"] += counts["cached_tokens_total"]
        for name in ("host_hits", "disk_hits", "written_back", "disk_damaged", "no_room"):
            self.seen[name] += counts["tiers"][f"{name}_total"]


class Canary(threading.Thread):
    """Asks until it is answered; wrong tokens come up in `join`."""

    def __init__(self, soak: Soak, number: int) -> None:
        super().__init__(daemon=True)
        self._soak, self._number = soak, number
        self._refused: list[str] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See the class."""
        try:
            until_heard(lambda: self._soak.server.url, self._soak.corpus, self._number, self._refused)
        except BaseException as error:
            self._error = error

    def join(self, timeout: float | None = 2 * PATIENCE) -> None:
        """Its end, and its error if it had one."""
        super().join(timeout)
        assert not self.is_alive(), f"a canary has heard nothing but {self._refused[-9:]}"
        if self._error is not None:
            raise self._error
        self._soak.seen["canaries"] += 1
        self._soak.seen["canaries refused"] += len(self._refused)
        self._soak.seen.update(self._refused)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_lives_of_a_server(count, tmp_path):
    """Half of the time goes to twelve lives, the other half to one, whose memory must not grow."""
    whole = count(full=1800, reduced=0)
    soak = Soak(tmp_path / "disk", Corpus(8 if whole else 2), seed=1)
    try:
        if whole:
            for share, endings in ((1 / 32, ENDINGS * 2), (1 / 16, ENDINGS), (1 / 2, ("term",))):
                for ending in endings:
                    soak.live(whole * share, ending)
        else:
            soak.live(0, "term")
            soak.round()
    finally:
        soak.server.process.kill()
        soak.server.end()
        for name, number in sorted(soak.seen.items()):
            print(f"{name}: {number}")
        for life in soak.memory:
            print("MiB:", " ".join(f"{one:.0f}" for one in life))
    assert soak.seen["clients killed"] and soak.seen["hits after a restart"]
    if whole:
        for name in (
            "done", "429 queue_full", "503 engine_failed", "503 draining", "event engine_failed", "canaries refused",
            "moments with a full pool", "rounds with a full disk tier", "failed steps", "host_hits", "disk_hits",
            *(f"ended by {ending}" for ending in ENDINGS),
        ):  # fmt: skip
            assert soak.seen[name], f"this has proven nothing about {name}"
        for life in soak.memory:
            if len(life) >= 16:
                early, late = (statistics.median(life[at : at + 8]) for at in (4, len(life) - 8))
                assert late < early + 24, f"memory grew from {early:.0f} to {late:.0f} MiB"
