"""Answers as types: what the OpenAPI document promises, and what tests hold every answer against.

Answers are written as plain tables, because most of their fields come and go with the request; these types say which
fields there can be. Fields that are always there have no default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class Error(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer other than 200."""

    error: Error


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens, those that were not run."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Of the drawn tokens: thinking, and what a draft model proposed."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(msgspec.Struct):
    """Where the time went, in seconds."""

    queue_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    tokens_per_second: float


class Alternative(msgspec.Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Alternative):
    """A drawn token, and what else was likely."""

    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the response's tokens."""

    content: list[ChosenToken]
    refusal: None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a text's tokens, one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionBody(msgspec.Struct):
    """Name and arguments; the latter are the text of a JSON object."""

    name: str
    arguments: str


class CallBody(msgspec.Struct):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionBody


class AnswerMessage(msgspec.Struct, kw_only=True):
    """An assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatBody(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: UsageBody
    timings: Timings


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionBody(msgspec.Struct, kw_only=True):
    """A whole completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: UsageBody
    timings: Timings


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(msgspec.Struct, kw_only=True):
    """A whole response; `output` has items of type message, reasoning and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: str
    user: str | None
    metadata: dict[str, Any]


class Card(msgspec.Struct):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    thinking: bool
    images: bool


class ModelList(msgspec.Struct):
    """The models of this server: one."""

    object: Literal["list"]
    data: list[Card]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct):
    """Text of tokens."""

    prompt: str


class Health(msgspec.Struct):
    """The process is alive."""

    status: str
    version: str


class Ready(msgspec.Struct):
    """Requests are taken."""

    status: str
    active: int


class Version(msgspec.Struct):
    """Of the program."""

    version: str
