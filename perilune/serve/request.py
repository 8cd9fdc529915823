"""What goes into generation and what comes out of it: the types shared by generator, engine and HTTP server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perilune.errors import RequestError

FinishReason = Literal["stop", "length", "tool_calls"]

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class FieldError(RequestError):
    """A request's field cannot be used.

    Attributes:
        param: the field's name, as the client wrote it.
        code: short machine-readable reason, or None.
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or (open_low and number == low):  # NaN is in no range
        raise FieldError(f"{name}={value!r} must be a number in {'(' if open_low else '['}{low:g}, {high:g}]", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FieldError(f"{name}={value!r} must be a whole number in {low}..{high}", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one answer is drawn and when it ends.

    Attributes:
        temperature: logits are divided by it; 0 = always the most likely token (lowest id among equals).
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.
        min_p: keep tokens at least this likely relative to the most likely one.
        seed: of the request's own random stream; None = a fresh one.
        max_tokens: the answer ends after this many tokens.
        stop: the answer ends before the first of these strings.
        stop_ids: the answer ends at the first of these tokens, besides those that end a document or a message.

    Raises:
        FieldError: a value out of range or of the wrong type.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("max_tokens", self.max_tokens, 1, 2**31)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        if len(self.stop) > MAX_STOPS:
            raise FieldError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise FieldError(f"stop={text!r} must be a string of 1..{MAX_STOP_CHARS} characters", "stop")
        for token_id in self.stop_ids:
            _integer("stop_ids", token_id, 0, 2**31)

    @property
    def greedy(self) -> bool:
        """Whether every draw is the most likely token."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """What a chat request says besides its messages; all of it is checked by the engine.

    Attributes:
        tools: OpenAI tools of the whole conversation.
        tool_choice: "auto", "none", "required", or the OpenAI object that names one function.
        response_format: OpenAI object, or None for text.
        thinking: think before the answer or not; None = as the model was taught.
        effort: how much to think: low, high or max; None says nothing about it.
        parallel_tool_calls: whether one answer may hold several calls.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    response_format: Mapping[str, Any] | None = None
    thinking: bool | None = None
    effort: str | None = None
    parallel_tool_calls: bool = True

    @property
    def one_shot(self) -> bool:
        """Whether the prompt says something behind the messages that holds for this one request."""
        form = self.response_format
        return self.tool_choice in ("required", "none") or (form is not None and form.get("type") != "text")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of a tool call.

    Attributes:
        position: which call of the answer, from 0.
        arguments: a piece of the arguments' JSON; the pieces of a call joined are one JSON object, unless the answer was
            cut inside of the call.
        id, name: on the first delta of a call only.
    """

    position: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one answer.

    Attributes:
        row: which answer of the batch.
        text: what became certain; may be empty on the last delta.
        finish_reason: None until the answer's last delta; "stop" = end token or stop string, "length" = max_tokens,
            "tool_calls" = end token behind at least one whole call.
        reasoning: the same for the think channel of a chat message.
        calls: the same for its tool calls, at most one delta a call.
    """

    row: int
    text: str
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, over all its answers.

    Attributes:
        prompt_tokens: tokens of the prompts.
        cached_tokens: those of them that did not go through the model, because a kept state already held them.
        completion_tokens: tokens drawn, end tokens included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went.

    Attributes:
        prefill_seconds: running the prompt.
        decode_seconds: drawing and running the answer.
        tokens_per_second: drawn tokens of all answers a second of `decode_seconds`.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
