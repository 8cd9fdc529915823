"""An engine without a model: it says what the test tells it to, and records what it was asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import fields, replace

from perilune.errors import CapacityError
from perilune.serve.engine import EngineMetrics
from perilune.serve.request import Delta, FieldError, Timing, Usage
from perilune.serve.worker import JobStream
from perilune.tokenizer import ByteTokenizer


class FakeJob:
    """Answers with `pieces` for each row; `gate` makes it wait before each piece.

    A piece is a text, a tuple of `CallDelta`s, a `Delta` (its row is replaced), or an error.
    """

    def __init__(self, engine: FakeEngine, rows: int) -> None:
        self.engine = engine
        self.rows = rows
        self.closed = False
        self.usage = Usage()
        self.timing = Timing()
        self.prompt_logprobs = engine.prompt_logprobs

    def close(self) -> None:
        self.closed = True

    def __iter__(self) -> Iterator[Delta]:
        engine = self.engine
        engine.started.set()
        for number, piece in enumerate(engine.pieces):
            if engine.gate is not None:
                engine.gate.acquire()
            if self.closed:
                engine.stopped.set()
                return
            if isinstance(piece, Exception):
                raise piece
            last = number == len(engine.pieces) - 1
            for row in range(self.rows):
                self.usage = Usage(7, 3, self.usage.completion_tokens + 1)
                if isinstance(piece, Delta):
                    yield replace(piece, row=row, finish_reason="stop" if last else None)
                elif isinstance(piece, tuple):
                    yield Delta(row, "", "tool_calls" if last else None, calls=piece)
                else:
                    yield Delta(row, piece, "stop" if last else None)
        self.timing = Timing(0.5, 0.25, 8.0)
        engine.finished.set()


class FakeLoop:
    """Runs jobs one after the other on a thread."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._queue = queue.SimpleQueue()
        self._unfinished: list[JobStream] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, job):
        if len(self._unfinished) >= self._max_waiting:
            raise CapacityError(f"{len(self._unfinished)} requests are waiting; try again later")
        stream = JobStream(job)
        self._unfinished.append(stream)
        self._queue.put(stream)
        return stream

    def shutdown(self, timeout: float = 10.0) -> None:
        for stream in list(self._unfinished):
            stream.close()
        self._queue.put(None)
        self._thread.join(min(timeout, 0.5))  # it may wait at a gate for ever

    def _run(self) -> None:
        while (stream := self._queue.get()) is not None:
            error = None
            try:
                if not stream.closed:
                    for delta in stream.job:
                        stream.push(delta)
            except BaseException as caught:
                error = caught
            self._unfinished.remove(stream)
            stream.end(error)


class FakeEngine:
    """See the module; `asked` lists (endpoint, prompt or messages, params, n), `options` are those of the last chat."""

    name = "fake"
    context_length = 100
    tokenizer = ByteTokenizer()
    ready, closed, thinking, takes_images = True, False, False, False
    prompt_logprobs: list | None = None

    def metrics(self):
        return EngineMetrics(
            **{field.name: {} if field.type.startswith("dict") else 0 for field in fields(EngineMetrics)}
        )

    def __init__(self, pieces=("Hel", "lo", " wörld"), gate: threading.Semaphore | None = None) -> None:
        self.pieces = list(pieces)
        self.gate = gate
        self.asked = []
        self.options = self.service = None
        self.jobs = []
        self.started = threading.Event()
        self.stopped = threading.Event()
        self.finished = threading.Event()

    def _job(self, rows: int) -> FakeJob:
        self.jobs.append(FakeJob(self, rows))
        return self.jobs[-1]

    def warm_up(self):
        pass

    def loop(self, max_waiting):
        return FakeLoop(max_waiting)

    def prompt_ids(self, messages, options=None, *, add_generation_prompt=True):
        return [len(messages), int(add_generation_prompt)]

    def chat(self, messages, params, n=1, options=None, service=None):
        if len(messages) > 5:
            raise FieldError("messages has 600 tokens", "messages", "context_length_exceeded")
        self.asked.append(("chat", messages, params, n))
        self.options, self.service = options, service
        return self._job(n)

    def complete(self, prompts, params, n=1, service=None):
        self.service = service
        self.asked.append(("complete", prompts, params, n))
        return self._job(n * len(prompts))
