"""An engine without a model: it says what the test tells it to, and records what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from perilune.serve.request import Delta, FieldError, Timing, Usage


class FakeJob:
    """Answers with `pieces` (text, or a tuple of `CallDelta`s) for each row; `gate` makes it wait before each piece."""

    def __init__(self, engine: FakeEngine, rows: int) -> None:
        self.engine = engine
        self.rows = rows
        self.closed = False
        self.usage = Usage()
        self.timing = Timing()

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
                if isinstance(piece, tuple):
                    yield Delta(row, "", "tool_calls" if last else None, calls=piece)
                else:
                    yield Delta(row, piece, "stop" if last else None)
        self.timing = Timing(0.5, 0.25, 8.0)
        engine.finished.set()


class FakeEngine:
    """See the module; `asked` lists (endpoint, prompt or messages, params, n), `options` are those of the last chat."""

    name = "fake"
    context_length = 100

    def __init__(self, pieces=("Hel", "lo", " wörld"), gate: threading.Semaphore | None = None) -> None:
        self.pieces = list(pieces)
        self.gate = gate
        self.asked = []
        self.options = None
        self.jobs = []
        self.started = threading.Event()
        self.stopped = threading.Event()
        self.finished = threading.Event()

    def _job(self, rows: int) -> FakeJob:
        self.jobs.append(FakeJob(self, rows))
        return self.jobs[-1]

    def chat(self, messages, params, n=1, options=None):
        if len(messages) > 5:
            raise FieldError("messages has 600 tokens", "messages", "context_length_exceeded")
        self.asked.append(("chat", messages, params, n))
        self.options = options
        return self._job(n)

    def complete(self, prompts, params, n=1):
        self.asked.append(("complete", prompts, params, n))
        return self._job(n * len(prompts))
