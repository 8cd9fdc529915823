"""The async end of a job: the engine's thread tells, an event loop reads.

A job runs on the engine's own thread beside all others; the event loop only ever waits for text. A job whose reader went
away is stopped before its next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perilune.errors import CapacityError
from perilune.serve.request import Delta

if TYPE_CHECKING:
    from perilune.serve.engine import Job, JobEnd


class JobStream:
    """The reading end of a submitted job; belongs to the event loop that submitted it.

    Attributes:
        answered: the reader has all it wants; what the job does after its last text may go on.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.closed = False
        self.answered = False
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._deltas: deque[Delta] = deque()
        self._error: BaseException | None = None
        self._ended = False

    @property
    def pending(self) -> int:
        """Deltas that have arrived and were not read."""
        return len(self._deltas)

    async def next(self, timeout: float | None = None) -> list[Delta] | None:
        """All text that has arrived, waiting for some; [] after `timeout` seconds without any, None at the end.

        Raises what the job raised.
        """
        if not self._deltas and not self._ended:
            self._ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), timeout)
        if self._deltas:
            deltas = list(self._deltas)
            self._deltas.clear()
            return deltas
        if self._error is not None:
            raise self._error
        return None if self._ended else []

    def release(self) -> None:
        """The reader leaves: stop the job unless it has answered."""
        if not self.answered:
            self.close()

    def close(self) -> None:
        """Stop the job if it has not ended."""
        self.closed = True
        self.job.close()

    def fail(self, error: BaseException) -> None:
        """End reading with an error now, and stop the job; called on the event loop. The first end counts."""
        self._end(error)
        self._ready.set()
        self.close()

    def hear(self, event: Delta | JobEnd) -> None:
        """The listener of the job, called on the engine's thread."""
        if isinstance(event, Delta):
            self.push(event)
        else:
            self.end(event.error)

    def push(self, delta: Delta) -> None:
        """Called on the engine's thread."""
        self._call(self._deltas.append, delta)

    def end(self, error: BaseException | None) -> None:
        """Called on the engine's thread, once."""
        self._call(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if not self._ended:
            self._error, self._ended = error, True

    def _call(self, change: Callable[[Any], None], value: Any) -> None:
        def apply() -> None:
            change(value)
            self._ready.set()

        with contextlib.suppress(RuntimeError):  # the reader's loop has ended
            self._loop.call_soon_threadsafe(apply)


class JobLoop:
    """Submits jobs to their engine's thread and counts those that have not ended.

    Args:
        max_waiting: jobs that may wait or run; one more is refused.
    """

    def __init__(self, max_waiting: int = 64) -> None:
        self.max_waiting = max_waiting
        self._lock = threading.Lock()
        self._streams: set[JobStream] = set()

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        return len(self._streams)

    def submit(self, job: Job) -> JobStream:
        """Begin a job; call it on the event loop that will read the text.

        Raises:
            CapacityError: too many jobs wait already.
            EngineClosed: the engine takes no more requests.
        """
        stream = JobStream(job)
        with self._lock:
            if len(self._streams) >= self.max_waiting:
                raise CapacityError(
                    f"{len(self._streams)} requests are waiting and at most {self.max_waiting} may; try again later"
                )
            self._streams.add(stream)

        def hear(event: Delta | JobEnd) -> None:
            if not isinstance(event, Delta):
                with self._lock:
                    self._streams.discard(stream)
            stream.hear(event)

        try:
            job.start(hear)
        except BaseException:
            with self._lock:
                self._streams.discard(stream)
            raise
        return stream

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop all jobs; returns when they have ended, or after `timeout` seconds."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        ended = threading.Event()
        for _ in range(int(timeout / 0.01)):
            if not self._streams:
                return
            ended.wait(0.01)
