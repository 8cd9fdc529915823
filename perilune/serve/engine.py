"""What the HTTP server, the chat session and agents need of a model: nothing here knows torch.

An engine checks a request and makes its prompt at once, so a bad request fails before anything is sent; the model runs
once the job is started or iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from perilune.errors import PeriluneError
from perilune.serve.request import ChatOptions, Delta, SamplingParams, Service, Timing, TokenLogprob, Usage
from perilune.serve.worker import JobStream
from perilune.tokenizer import Tokenizer


class EngineFailed(PeriluneError):
    """The model failed while a request was running; nothing is wrong with the request.

    Attributes:
        temporary: asking again may help.
    """

    temporary = True


class EngineClosed(EngineFailed):
    """The engine takes no more requests, for good; another server may, or this one once it has been started again."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The last thing that a job's listener hears.

    Attributes:
        error: why it ended early; None = all answers are complete, or it was closed.
    """

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A request met the prefix cache.

    Attributes:
        number: counts from 1.
        time: seconds since the epoch.
        request: its id, or the sequence's name.
        prompt_tokens: of its prompt.
        hit_tokens: that it skipped.
        kv_tokens: whose pages were there; more than `hit_tokens` where no state was that deep.
    """

    number: int
    time: float
    request: str
    prompt_tokens: int
    hit_tokens: int
    kv_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMetrics:
    """A snapshot of an engine; totals only grow.

    Attributes:
        running, waiting: sequences (a request has one for each answer); waiting_by_class by class name.
        steps_total, failed_steps_total, preempted_total: steps run, steps that raised, sequences that started again.
        prompt_tokens_total: of admitted sequences: the sum of the next three.
        cached_tokens_total: skipped; recomputed_below_kv_tokens_total: pages were cached, but no state was that deep;
        missed_tokens_total: computed because nothing was cached.
        generated_tokens_total: drawn.
        model_tokens_total: that went through the model.
        pages_total, pages_free, pages_cached, pages_used: of the pool; `used` = held by running requests.
        page_bytes: of each.
        checkpoints_created_total, checkpoints_used_total, checkpoints_evicted_total: by the reason they were taken.
        scheduler_seconds_total, step_seconds_total: planning and settling; running, drawing and telling.
        wait_seconds_total: of the latter, waiting for the device.
        overlapped_steps_total: steps that were launched behind another one under way.
        compilations_total, compilation_seconds_total: kernels compiled or loaded and passes recorded since the warm-up.
        tiers: counts of the host and disk tiers, empty without them.
    """

    running: int
    waiting: int
    waiting_by_class: dict[str, int]
    steps_total: int
    failed_steps_total: int
    preempted_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    recomputed_below_kv_tokens_total: int
    missed_tokens_total: int
    generated_tokens_total: int
    model_tokens_total: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_used: int
    page_bytes: int
    checkpoints_created_total: dict[str, int]
    checkpoints_used_total: dict[str, int]
    checkpoints_evicted_total: dict[str, int]
    scheduler_seconds_total: float
    step_seconds_total: float
    wait_seconds_total: float = 0.0
    overlapped_steps_total: int = 0
    compilations_total: int = 0
    compilation_seconds_total: float = 0.0
    tiers: dict[str, int] = field(default_factory=dict)


class Job(Protocol):
    """A request; iterate it, or start it with a listener."""

    def __iter__(self) -> Iterator[Delta]:
        """Start it, and wait for each piece of text; leaving the loop stops it."""
        ...

    def start(self, listener: Callable[[Delta | JobEnd], None]) -> None:
        """Start it and return at once.

        Args:
            listener: called on the engine's thread with every delta, then once with a `JobEnd`; must not block.

        Raises:
            EngineClosed: the engine takes no more requests.
        """
        ...

    def close(self) -> None:
        """Stop: nothing is drawn any more. From any thread, at any time."""
        ...

    @property
    def usage(self) -> Usage:
        """Token counts so far; complete once the job has ended."""
        ...

    @property
    def timing(self) -> Timing:
        """Seconds so far."""
        ...

    @property
    def position(self) -> int:
        """Requests in front of it in its queue; 0 once it runs."""
        ...

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprob | None]] | None:
        """Of each prompt one entry a token, None for its first; None if they were not asked for."""
        ...


class Loop(Protocol):
    """Runs jobs beside the event loop that reads their text."""

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        ...

    def submit(self, job: Job) -> JobStream:
        """Begin; call it on the event loop that will read. CapacityError: too many wait already; EngineClosed: see `Job`."""
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
        thinking: whether the model was taught to think before it answers.
        admin: what an operator may do (`administration.Administration`); None = nothing.
    """

    name: str
    context_length: int
    tokenizer: Tokenizer
    thinking: bool
    admin: Any

    def warm_up(self) -> object:
        """Do once what would else be done while the first requests wait, and return when it is done; others may ask meanwhile."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold pictures."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it takes requests and works on them."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests, for good: it was closed, or a fault of its own has ended it."""
        ...

    def metrics(self) -> EngineMetrics:
        """A snapshot of counts, from any thread."""
        ...

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
