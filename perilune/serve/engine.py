"""What the HTTP server and the chat session need of a model: nothing here knows torch.

An engine checks a request and makes its prompt at once, so a bad request fails before anything is sent; the model runs
only while the job is iterated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from perilune.serve.request import ChatOptions, Delta, SamplingParams, Timing, Usage


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


class Engine(Protocol):
    """What the HTTP server and the chat session need of a model.

    Attributes:
        name: the model's name for clients.
        context_length: most tokens of a prompt and its answer together.
    """

    name: str
    context_length: int

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        n: int = 1,
        options: ChatOptions | None = None,
    ) -> Job:
        """`n` answers to a conversation.

        Raises:
            RequestError: it cannot be rendered, leaves no room for an answer, or has options that the model or its
                grammar cannot keep.
        """
        ...

    def complete(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, n: int = 1) -> Job:
        """`n` continuations of each prompt, row = prompt index * n + choice. RequestError as for `chat`."""
        ...
