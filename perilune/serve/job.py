"""A request on its way through an engine: submitted once, heard by one listener, stopped at any time from any thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from perilune.serve.answer import Answer
from perilune.serve.engine import JobEnd
from perilune.serve.request import Delta, Service, Timing, TokenLogprob, Usage
from perilune.serve.schedule import Sequence

if TYPE_CHECKING:
    from perilune.serve.local_engine import LocalEngine

Listener = Callable[[Delta | JobEnd], None]


class LocalJob:
    """A job of a `LocalEngine`; see `Job`.

    Args:
        engine: whose core runs it; kept alive until it has ended.
        sequences: one an answer, each with an `Answer` as its content, in the order of rows.
        prompts: the first sequence of each prompt; the others of the same prompt are its followers.
        service: how it is to be treated.
        weights: number of the engine's weights when it was made.
    """

    def __init__(
        self, engine: LocalEngine, sequences: list[Sequence], prompts: list[Sequence], service: Service, weights: int
    ) -> None:
        self._engine, self._core = engine, engine.core
        self.sequences, self.prompts, self.service, self.weights = sequences, prompts, service, weights
        self.answers: list[Answer] = [sequence.content for sequence in sequences]
        self.closed = False
        self._arrived = 0.0
        self._listener: Listener | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        """As the client named it, or empty."""
        return self.service.request_id

    @property
    def ended(self) -> bool:
        """Whether its listener has heard the end."""
        return self._ended

    # ---- the side of whoever asked

    def start(self, listener: Listener) -> None:
        """Hand it to the engine and return at once.

        Args:
            listener: called on the engine's thread with every `Delta`, then once with a `JobEnd`; must not block.

        Raises:
            EngineClosed: the engine takes no more requests.
        """
        assert self._listener is None, "a job runs once"
        self._listener, self._arrived = listener, time.perf_counter()
        self._core.submit(self)

    def __iter__(self) -> Iterator[Delta]:
        heard: queue.SimpleQueue[Delta | JobEnd] = queue.SimpleQueue()
        try:
            self.start(heard.put)
            while not self.closed and not isinstance(event := heard.get(), JobEnd):
                yield event
            if not self.closed and event.error is not None:
                raise event.error
        finally:
            self.close()

    def close(self) -> None:
        """Stop, if it has not ended: nothing is drawn for it any more."""
        if not self.closed:
            self.closed = True
            if self._listener is not None and not self._ended:
                self._core.abort(self)

    @property
    def position(self) -> int:
        """Requests in front of it in the queue of its class; 0 once it runs."""
        return self._core.position(self)

    @property
    def usage(self) -> Usage:
        """Token counts so far; a prompt that several answers share counts once."""
        return Usage(
            prompt_tokens=sum(sequence.prompt for sequence in self.prompts),
            cached_tokens=sum(sequence.resume or 0 for sequence in self.prompts),
            completion_tokens=sum(len(answer.token_ids) for answer in self.answers),
            reasoning_tokens=sum(answer.reader.reasoning_tokens for answer in self.answers),
        )

    @property
    def timing(self) -> Timing:
        """Seconds so far."""
        drawn = [answer for answer in self.answers if answer.first]
        started = min((answer.started for answer in self.answers if answer.started), default=0.0)
        if not drawn:
            return Timing(queue_seconds=started - self._arrived if started else 0.0)
        first, last = min(answer.first for answer in drawn), max(answer.last for answer in drawn)
        more = sum(
            len(answer.token_ids) - 1 for answer in drawn
        )  # the first ones were drawn from the prompt's own pass
        return Timing(
            prefill_seconds=first - started,
            decode_seconds=last - first,
            tokens_per_second=more / (last - first) if last > first else 0.0,
            queue_seconds=started - self._arrived,
            first_token_seconds=first - self._arrived,
        )

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprob | None]] | None:
        """Of each prompt one entry a token, None for its first; None if they were not asked for."""
        if not self.answers[0].wants_prompt_scores:
            return None
        return [[None, *sequence.content.prompt_logprobs] for sequence in self.prompts]

    # ---- the side of the engine's thread

    def begun(self) -> None:
        """The engine takes it in; its weights may have changed since it was made."""
        if self.weights != self._engine.prefixes.weights_number:
            self._engine.prefixes.rename(self)

    def push(self, delta: Delta) -> None:
        """Tell the listener."""
        if not self._ended and not self.closed and self._listener is not None:
            self._listener(delta)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the listener that this was all; further calls do nothing."""
        if not self._ended:
            self._ended = True
            if self._listener is not None:
                self._listener(JobEnd(error))
