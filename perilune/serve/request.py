"""What goes into generation and what comes out of it: the types shared by generator, engine and HTTP server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.serve.reader import Piece

FinishReason = Literal["stop", "length", "tool_calls"]

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20


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


def _count(name: str, values: object, what: str, most: int) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise FieldError(f"{name}={values!r:.80} must be a tuple of {what}", name)
    if len(values) > most:
        raise FieldError(f"{name} has {len(values)} {what}; at most {most} are allowed", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FieldError(f"{name}={value!r} must be a whole number in {low}..{high}", name)


@dataclass(frozen=True, slots=True)
class Structured:
    """The form that the text of an answer must have, kept by a grammar while it is drawn.

    Attributes:
        kind: "json" (a JSON schema), "regex", "choice" (one of several texts), or "grammar" (Lark, or GBNF with `::=`).
        value: the schema, the expression, the texts, or the grammar's text.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one answer is drawn and when it ends.

    The order is that of the attributes up to `min_p`: what is forbidden, bias, penalties, temperature, filters.

    Attributes:
        structured: the form of the answer; None = any.
        min_tokens: nothing ends the answer before it has this many tokens.
        ignore_eos: tokens that end a document or a message are never drawn.
        logit_bias: (token id, number that is added to its logit).
        repetition_penalty: logits of tokens that the prompt or the answer has are divided by it (multiplied where
            negative), 0.01 to 100; 1 = none.
        frequency_penalty: subtracted from a token's logit once for each time that the answer has it.
        presence_penalty: subtracted from a token's logit if the answer has it.
        temperature: logits are divided by it; 0 = always the most likely token (lowest id among equals).
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.
        min_p: keep tokens at least this likely relative to the most likely one.
        seed: of the request's own random numbers; None = fresh ones.
        max_tokens: the answer ends after this many tokens.
        stop: the answer ends before the first of these strings; a single one may be given as it is.
        include_stop: the string that ended the answer is part of it.
        stop_ids: the answer ends at the first of these tokens, besides those that end a document or a message.
        logprobs: log-probabilities of the drawn tokens and of this many alternatives each; None = none at all. They are
            the model's own, before everything above.
        prompt_logprobs: the same for the tokens of the prompt.

    Raises:
        FieldError: a value out of range or of the wrong type.
    """

    structured: Structured | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _integer("max_tokens", self.max_tokens, 1, 2**31)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if isinstance(self.stop, str):  # it would be read as a string for each of its characters
            object.__setattr__(self, "stop", (self.stop,))
        _count("stop", self.stop, "strings", MAX_STOPS)
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise FieldError(f"stop={text!r} must be a string of 1..{MAX_STOP_CHARS} characters", "stop")
        _count("stop_ids", self.stop_ids, "ids", MAX_STOP_IDS)
        for token_id in self.stop_ids:
            _integer("stop_ids", token_id, 0, 2**31)
        _count("logit_bias", self.logit_bias, "entries", MAX_BIASES)
        for pair in self.logit_bias:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise FieldError(f"logit_bias has {pair!r:.80}; its entries are (token id, number)", "logit_bias")
            token_id, bias = pair
            _integer("logit_bias", token_id, 0, 2**31)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether every draw is the most likely token."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether a token's chance depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """FieldError if a bias names a token that the model does not have."""
        for token_id, _ in self.logit_bias:
            _integer("logit_bias", token_id, 0, vocab_size - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """How a request is treated, apart from what its answer says.

    Attributes:
        priority: a lower one is served earlier, and gives way later; -1000 to 1000.
        session_id: requests of one conversation; the engine may keep its cache longer.
        cache_salt: only requests with the same salt share cached prefixes.
        request_id: the name that logs and admin endpoints use.

    Raises:
        FieldError: a value out of range or of the wrong type.
    """

    priority: int = 0
    session_id: str | None = None
    cache_salt: str = ""
    request_id: str = ""

    def __post_init__(self) -> None:
        _integer("priority", self.priority, -1000, 1000)
        for name in ("session_id", "cache_salt", "request_id"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "session_id"):
                raise FieldError(f"{name}={value!r:.80} must be a text", name)


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
class TokenLogprob:
    """A token and how likely the model thought it.

    Attributes:
        logprob: natural logarithm of its probability, before penalties, temperature and filters.
        top: (token id, logprob) of the most likely tokens, most likely first.
        offset: characters of the text in front of it (of a chat message: of the response).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0


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
        logprobs: of the tokens whose text this is (of a chat message: tokens of the response), if they were asked for.
        token_ids: all tokens drawn since the last delta.
    """

    row: int
    text: str
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, row: int, piece: Piece, finish_reason: FinishReason | None = None) -> Delta:
        """What a reader released."""
        return cls(row, piece.text, finish_reason, piece.reasoning, piece.calls, piece.logprobs, piece.token_ids)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, over all its answers.

    Attributes:
        prompt_tokens: tokens of the prompts.
        cached_tokens: those of them that did not go through the model, because a kept state already held them.
        completion_tokens: tokens drawn, end tokens included.
        reasoning_tokens: those of them that were drawn before thinking ended.
        accepted_drafts, rejected_drafts: tokens that a draft model proposed and the model took or refused.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went.

    Attributes:
        prefill_seconds: running the prompt.
        decode_seconds: drawing and running the answer.
        tokens_per_second: drawn tokens of all answers a second of `decode_seconds`.
        queue_seconds: waiting for its turn.
        first_token_seconds: from its arrival to the first drawn token.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
