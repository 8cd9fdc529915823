"""What a soak of a server needs: the right answers, a server that can be stopped in four ways, and a look for leaks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import torch
from soak_client import ask
from soak_server import CONTEXT, DISK_BYTES
from tiny_model import tiny_engine, uncached

from perilune.serve.request import SamplingParams

HERE = Path(__file__).parent
LONGEST = 24  # tokens of an answer
PATIENCE = 300  # seconds that anything may take on a machine that does other things as well


class Corpus:
    """Prompts that begin alike, and the answers of an engine without a cache.

    Args:
        trunks: first halves of prompts; each has three endings, and each of these a second turn.
    """

    def __init__(self, trunks: int) -> None:
        chance = random.Random(0)

        def tokens(least: int, most: int) -> list[int]:
            return chance.choices(range(256), k=chance.randint(least, most))

        firsts = [trunk + tokens(4, 24) for trunk in (tokens(24, 48) for _ in range(trunks)) for _ in range(3)]
        self.prompts: list[list[int]] = []
        self.truth: list[list[int]] = []
        self._answer(firsts)
        self._answer([first + answer[:12] + tokens(2, 20) for first, answer in zip(firsts, self.truth)])

    def _answer(self, prompts: list[list[int]]) -> None:
        engine = tiny_engine(context_length=CONTEXT, settings=uncached(), dtype=torch.float64)
        job = engine.complete(prompts, SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True))
        list(job)
        self.prompts += prompts
        self.truth += [answer.token_ids for answer in job.answers]
        engine.close()

    def body(self, number: int, tokens: int = LONGEST, **more: Any) -> dict[str, Any]:
        """A request for the beginning of an answer."""
        return {
            "prompt": self.prompts[number], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        } | more  # fmt: skip

    def is_right(self, number: int, tokens: int, ids: list[int]) -> bool:
        """Whether these are the first tokens of the answer: all that were asked for, or those before it was cut."""
        return len(ids) <= tokens and ids == self.truth[number][: len(ids)]


class Server:
    """A server process over a folder.

    Args:
        folder: of its disk tier.
        overlap: whether its engine plans steps ahead, as on a GPU.

    Attributes:
        url, admin_url: where it listens.
        log: its last lines of standard error.
    """

    def __init__(self, folder: Path, *, overlap: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "soak_server.py"), str(folder), *(["overlap"] if overlap else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.log: deque[str] = deque(maxlen=2000)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert line, self.last_words()
        addresses = json.loads(line)
        self.url, self.admin_url = addresses["url"], addresses["admin_url"]
        self._admin = httpx.Client(base_url=self.admin_url, timeout=PATIENCE, headers={"Connection": "close"})

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    def last_words(self) -> str:
        """Its log, complete once it has ended."""
        if self.process.poll() is not None:
            self._reader.join(PATIENCE)
        return "".join(self.log)

    def fail(self, fault: str) -> None:
        """See `soak_server`."""
        self.process.stdin.write(fault + "\n")
        self.process.stdin.flush()

    def admin(self, name: str) -> dict[str, Any]:
        """What the operator sees."""
        response = self._admin.get(f"/admin/{name}")
        assert response.status_code == 200, response.text
        return response.json()

    def end(self) -> int:
        """Wait for its end; returns the exit status."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self._admin.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        return code

    def quiet(self) -> dict[str, Any]:
        """Wait until nothing runs, then look for leaks; returns the engine's counts."""
        until = time.monotonic() + PATIENCE
        while True:
            counts, requests = self.admin("engine"), self.admin("requests")["requests"]
            if not counts["running"] + counts["waiting"] + len(requests):
                break
            assert time.monotonic() < until, (counts, requests, self.last_words())
            time.sleep(0.05)
        assert counts["pages_used"] == 0, f"{counts['pages_used']} pages are held by nobody"
        assert self.admin("invariants") == {"ok": True, "violations": []}
        return counts

    def open_files(self) -> int:
        """File descriptors of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads_and_memory(self) -> tuple[int, float]:
        """Threads, and resident MiB."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return int(fields["Threads"]), int(fields["VmRSS"].split()[0]) / 1024


class Clients:
    """A process of several clients.

    Args:
        url: of the server.
        corpus: what is asked.
        chance: decides everything.
    """

    def __init__(self, url: str, corpus: Corpus, chance: random.Random) -> None:
        self._corpus = corpus
        self.asked = [(chance.randrange(len(corpus.prompts)), chance.randint(1, LONGEST)) for _ in range(chance.randint(1, 4))]  # fmt: skip
        requests = []
        for number, tokens in self.asked:
            more: dict[str, Any] = {"stream": chance.random() < 0.7, "n": chance.choice((1, 1, 1, 2))}
            if chance.random() < 0.3:
                more |= {"session_id": f"session {chance.randrange(8)}"}
            if chance.random() < 0.1:
                more |= {"cache_salt": "another tenant"}
            body = corpus.body(number, tokens, **more)
            requests.append({"path": "/v1/completions", "body": body, "pause": chance.choice((0.0, 0.0, 0.05))})
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(HERE / "soak_client.py"), url, json.dumps(requests)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def outcomes(self) -> list[str]:
        """Wait for the end; one word for each request that was not killed. Wrong tokens fail here."""
        lines, _ = self.process.communicate(timeout=2 * PATIENCE)
        return [self._outcome(json.loads(line)) for line in lines.splitlines() if line.endswith("}")]

    def _outcome(self, heard: dict[str, Any]) -> str:
        number, tokens = self.asked[heard["number"]]
        for ids in heard["ids"].values():
            assert self._corpus.is_right(number, tokens, ids), f"wrong tokens: {ids} for prompt {number}"
        return outcome(heard)


def outcome(heard: dict[str, Any]) -> str:
    """A word for what a client heard; refusals must say why and when to come back."""
    if heard["whole"] and heard["code"] is None:
        return "done"
    if heard["status"] in (429, 503):
        assert heard["code"] and float(heard["retry_after"]) >= 1, heard
        return f"{heard['status']} {heard['code']}"
    if heard["status"] == 200 and heard["code"]:
        return f"event {heard['code']}"
    assert heard["status"] in (0, 200), heard
    return "lost"


def until_heard(url, corpus: Corpus, number: int, refused: list[str], **more: Any) -> dict[str, Any]:
    """A client that comes back whenever it is refused; `url` is called for each try. Its answer must be whole and right."""
    until = time.monotonic() + PATIENCE
    while True:
        heard = ask(url(), "/v1/completions", corpus.body(number, **more))
        if (what := outcome(heard)) == "done":
            assert heard["ids"] == {"0": corpus.truth[number]}, f"a canary sings another song: {heard['ids']}"
            return heard
        refused.append(what)
        assert time.monotonic() < until, refused
        time.sleep(0.1)


def size_of(folder: Path) -> int:
    """Bytes of the disk tier, without its headers; a file that goes while it is counted is gone."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
        if path.suffix != ".part":
            total -= len(b"".join(path.open("rb").readlines()[:2])) if path.exists() else 0
    return total


def holds(folder: Path) -> bool:
    """Whether the disk tier's folder is within its bounds; one prefix may be under way."""
    return size_of(folder) <= DISK_BYTES + 2**16
