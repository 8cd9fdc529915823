"""A load generator: it sends the requests of a trace to a server, and writes down when which token came.

Arrivals are open-loop: a request is sent when the trace says so, however slow the server is, and its times count from
then; a turn comes when the turn before has been answered. With `concurrency` the trace's own times are not used, and so
many clients send one request after the other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from perilune.bench.serve_traces import Ask
from perilune.errors import CapacityError


@dataclass
class Record:
    """What happened to one request; times in seconds since the trace began.

    Attributes:
        kind: class by prompt length: short, medium, long.
        due: when it was to be sent.
        tokens: when tokens came, and how many.
        status: 200, another status, or 0 = no connection; 499 = its client went away.
        reply: ids that were drawn.
    """

    index: int
    kind: str
    due: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: list[tuple[float, int]] = field(default_factory=list)
    end: float = 0.0
    status: int = 0
    reply: list[int] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        """Tokens of the answer that arrived."""
        return sum(count for _, count in self.tokens)

    @property
    def first(self) -> float | None:
        """Seconds from `due` to the first token."""
        return self.tokens[0][0] - self.due if self.tokens else None

    @property
    def each(self) -> float | None:
        """Seconds a token, behind the first ones; None for fewer than two arrivals."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1][0] - self.tokens[0][0]) / sum(count for _, count in self.tokens[1:])

    def to_json(self) -> dict[str, Any]:
        """Without the ids."""
        return {key: value for key, value in asdict(self).items() if key != "reply"}


def kind_of(tokens: int, context: int) -> str:
    """Class of a prompt, as the scheduler has them."""
    short = min(2048, max(256, context // 32))
    return "short" if tokens <= short else "medium" if tokens <= max(4 * short, min(32768, context // 4)) else "long"


class Load:
    """One run of a trace.

    Args:
        asks: the trace.
        url: of the server, without a trailing slash.
        model: as the server calls it.
        context: of the model; no prompt and answer are longer together.
        key: API key, or empty.
        concurrency: clients of the closed loop; 0 = the trace's own times.
    """

    def __init__(
        self, asks: Sequence[Ask], url: str, *, model: str, context: int, key: str = "", concurrency: int = 0
    ) -> None:
        self._asks, self._url, self._model, self._context = asks, url, model, context
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._clients = asyncio.Semaphore(concurrency) if concurrency else None
        self._done = [asyncio.Event() for _ in asks]
        self._prompts: list[list[int]] = [[] for _ in asks]
        self._began = 0.0
        self.records = [Record(index, "", 0.0) for index in range(len(asks))]

    async def run(self) -> list[Record]:
        """Send everything; returns when everything has ended.

        Raises:
            CapacityError: the server cannot be reached at all.
        """
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=None, limits=limits, headers=self._headers) as client:
            try:
                await client.get(self._url + "/health")
            except httpx.HTTPError as error:
                raise CapacityError(f"no server answers at {self._url}: {error}") from None
            self._began = time.perf_counter()
            await asyncio.gather(*(self._one(client, index) for index in range(len(self._asks))))
        return self.records

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _one(self, client: Any, index: int) -> None:
        ask, record = self._asks[index], self.records[index]
        before: list[int] = []
        try:
            if ask.after >= 0:
                await self._done[ask.after].wait()
                earlier = self.records[ask.after]
                if earlier.status != 200:
                    return  # nobody goes on behind an answer that did not come
                before = self._prompts[ask.after] + earlier.reply
            if self._clients is None:
                record.due = ask.at + (self.records[ask.after].end if ask.after >= 0 else 0.0)
                await asyncio.sleep(max(0.0, record.due - self._now()))
                await self._send(client, ask, record, before)
            else:
                async with self._clients:
                    record.due = self._now()
                    await self._send(client, ask, record, before)
        finally:
            self._done[index].set()

    async def _send(self, client: Any, ask: Ask, record: Record, before: list[int]) -> None:
        import httpx

        prompt = [*before, *ask.new][-(self._context - ask.reply) :]
        self._prompts[record.index] = prompt
        record.prompt_tokens, record.kind = len(prompt), kind_of(len(prompt), self._context)
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": ask.reply, "ignore_eos": True, "stream": True,
            "temperature": 1.0, "seed": record.index, "return_token_ids": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        leave = max(1, int(ask.cut * ask.reply)) if ask.cut < 1 else None
        try:
            async with client.stream("POST", self._url + "/v1/completions", json=body) as response:
                record.status = response.status_code
                if record.status == 200:
                    async for value in _events(response):
                        self._read(value, record)
                        if leave is not None and record.drawn >= leave:
                            record.status = 499
                            break
        except httpx.HTTPError:
            record.status = 0
        record.end = self._now()

    def _read(self, value: dict[str, Any], record: Record) -> None:
        if "error" in value:
            record.status = 500
        for choice in value.get("choices", []):
            ids = choice.get("token_ids") or []
            if ids:
                record.tokens.append((self._now(), len(ids)))
                record.reply += ids
        usage = value.get("usage")
        if usage:
            record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream. Its lines end by a line feed and nothing else: a text may hold what Python takes for line ends."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
