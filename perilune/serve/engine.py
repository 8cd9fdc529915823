"""What the HTTP server and the chat session need of a model: nothing here knows torch.

An engine checks a request and makes its prompt at once, so a bad request fails before anything is sent; the model runs
only while the job is iterated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from perilune.serve.request import ChatOptions, Delta, SamplingParams, Service, Timing, Usage
from perilune.serve.worker import JobStream
from perilune.tokenizer import Tokenizer


class Job(Protocol):
    """A request that is being answered; iterate it to the end, or call `close` to stop early."""

    def __iter__(self) -> Iterator[Delta]: ...

    def close(self) -> None:
        """Stop: iterating ends before the next token. May be called from another thread."""
        ...

    @property
    def usage(self) -> Usage:
        """Token counts so far; complete once iteration has ended."""
        ...

    @property
    def timing(self) -> Timing:
        """Seconds so far."""
        ...


class Loop(Protocol):
    """Runs jobs beside the event loop that reads their text."""

    def submit(self, job: Job) -> JobStream:
        """Begin; call it on the event loop that will read. CapacityError: too many wait already."""
        ...

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop what runs, drop what waits."""
        ...


class Engine(Protocol):
    """What the HTTP server and the chat session need of a model.

    Attributes:
        name: the model's name for clients.
        context_length: most tokens of a prompt and its answer together.
        tokenizer: of the model.
    """

    name: str
    context_length: int
    tokenizer: Tokenizer

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        n: int = 1,
        options: ChatOptions | None = None,
        service: Service | None = None,
    ) -> Job:
        """`n` answers to a conversation.

        Raises:
            RequestError: it cannot be rendered, leaves no room for an answer, or has options that the model or its
                grammar cannot keep.
        """
        ...

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        service: Service | None = None,
    ) -> Job:
        """`n` continuations of each prompt, row = prompt index * n + choice. RequestError as for `chat`."""
        ...

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Tokens of a conversation as `chat` would send them to the model. RequestError as for `chat`."""
        ...

    def loop(self, max_waiting: int) -> Loop:
        """Something that runs jobs, at most `max_waiting` of them waiting or running."""
        ...
