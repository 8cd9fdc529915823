"""One request that is being answered, and all that are: deltas with a clock, an end in any case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from perilune.http.errors import APIError
from perilune.serve.api.metrics import Metrics
from perilune.serve.engine import Job
from perilune.serve.request import Delta
from perilune.serve.worker import JobStream


class Exchange:
    """A request and its job.

    Args:
        exchanges: where it is listed until it ends.
        name: the request's id.
        stream: of its job, which has been handed to the engine.
        rows: how many answers it has.
        seconds: after which it is given up; None = never.

    Attributes:
        job: what the engine does.
        record: what is logged.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        name: str,
        stream: JobStream,
        rows: int,
        seconds: float | None,
        record: dict[str, Any],
    ) -> None:
        self.name = name
        self.job: Job = stream.job
        self.record = record
        self._exchanges = exchanges
        self._stream = stream
        self._rows = rows
        self._began = time.perf_counter()
        self._deadline = None if seconds is None else self._began + seconds
        self._reasons: dict[int, str] = {}
        self._last: float | None = None
        self._open = True
        exchanges.add(self)

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._began

    async def deltas(self, heartbeat: float | None) -> AsyncIterator[Delta | None]:
        """New text until every answer has ended; None after each `heartbeat` seconds without any.

        Raises:
            APIError: it took too long, or `fail` was called; and whatever the job raised.
        """
        while True:
            wait = heartbeat
            if self._deadline is not None:
                left = self._deadline - time.perf_counter()
                if left <= 0:
                    raise APIError(
                        504,
                        f"no answer within {self._deadline - self._began:g} s; ask for fewer tokens",
                        code="timeout",
                    )
                wait = left if wait is None else min(wait, left)
            deltas = await self._stream.next(wait)
            if deltas is None:
                return
            if deltas:
                self._clock(deltas)
            for delta in deltas:
                yield delta
            if self._stream.answered:
                return
            if not deltas:
                yield None

    def _clock(self, deltas: list[Delta]) -> None:
        now = time.perf_counter()
        if self._last is None:
            self._exchanges.metrics.first_token(now - self._began)
        else:
            self._exchanges.metrics.later_token(now - self._last)
        self._last = now
        for delta in deltas:
            if delta.finish_reason is not None:
                self._reasons[delta.row] = delta.finish_reason
        # The reader has everything; what the job does after its last text may go on.
        self._stream.answered = len(self._reasons) == self._rows

    def fail(self, error: APIError) -> None:
        """End it with an error, from outside; the job is stopped."""
        self._stream.fail(error)

    def close(self) -> None:
        """The end, in any case: a job that has not answered is stopped. Calling it again does nothing."""
        if not self._open:
            return
        self._open = False
        self._stream.release()
        usage, timing = self.job.usage, self.job.timing
        reasons = [self._reasons.get(row, "abort") for row in range(self._rows)]
        self.record |= {
            "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens, "finish": ",".join(dict.fromkeys(reasons)),
        }  # fmt: skip
        self._exchanges.remove(self)
        self._exchanges.metrics.ended(self.age, usage, timing, reasons)


class Exchanges:
    """All requests that are being answered.

    Args:
        metrics: told about each.

    Attributes:
        draining: the server takes no further requests.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.draining = False
        self._open: dict[int, Exchange] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, exchange: Exchange) -> None:
        """One more."""
        self._open[id(exchange)] = exchange
        self.metrics.began()

    def remove(self, exchange: Exchange) -> None:
        """One less."""
        del self._open[id(exchange)]
        self._changed.set()

    def listed(self) -> list[dict[str, Any]]:
        """What an operator sees of them."""
        return [
            {"request_id": one.name, "seconds": round(one.age, 3), "path": one.record.get("path")}
            | {"prompt_tokens": one.job.usage.prompt_tokens, "completion_tokens": one.job.usage.completion_tokens}
            for one in self._open.values()
        ]

    def abort(self, name: str | None, error: APIError) -> int:
        """End the requests of this name, or all; returns how many there were."""
        found = [one for one in self._open.values() if name is None or one.name == name]
        for one in found:
            one.fail(error)
        return len(found)

    async def drained(self, seconds: float) -> bool:
        """Wait until none is left; False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
            return True
        except TimeoutError:
            return False
