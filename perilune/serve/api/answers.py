"""Answers as clients read them: choices, chunks, token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perilune.serve.api.words import Words, joined
from perilune.serve.request import CallDelta, Delta, Timing, TokenLogprob, Usage


@dataclass
class WholeAnswer:
    """All deltas of one answer together.

    Attributes:
        calls: position -> the call so far.
        logprobs, token_ids: of all deltas.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: dict[int, CallDelta] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Add new text."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.finish_reason = delta.finish_reason
        self.logprobs += delta.logprobs
        self.token_ids += delta.token_ids
        for call in delta.calls:
            first = self.calls.get(call.position, call)
            arguments = call.arguments if first is call else first.arguments + call.arguments
            self.calls[call.position] = CallDelta(call.position, arguments, first.id, first.name)


@dataclass(frozen=True)
class Shown:
    """What a request wants to see of its answers.

    Attributes:
        words: how tokens are shown.
        logprobs: log-probabilities of drawn tokens.
        token_ids: ids of drawn tokens.
    """

    words: Words
    logprobs: bool = False
    token_ids: bool = False


class Shape(Protocol):
    """How one endpoint writes its answers.

    Attributes:
        prefix: of an answer's id.
        object, chunk_object: names of a whole answer and of a streamed piece.
    """

    prefix: str
    object: str
    chunk_object: str

    def choice(self, row: int, answer: WholeAnswer) -> dict[str, Any]:
        """A whole answer."""
        ...

    def usage(self, usage: Usage) -> Usage:
        """What is said about token counts."""
        ...

    def first_chunk(self, row: int) -> dict[str, Any] | None:
        """What comes before any text; asked for when the first text is there."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """New text; `finish_reason` is null until the answer's last chunk."""
        ...


def _reasoning(text: str) -> dict[str, str]:
    """Clients read either name."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(call: CallDelta) -> dict[str, Any]:
    """A tool call, or a piece of one: its id, type and name are on the first piece only."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def choice(self, row: int, answer: WholeAnswer) -> dict[str, Any]:
        """See `Shape.choice`. Beside calls an empty text is null, as clients expect."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        message |= _reasoning(answer.reasoning)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_call(call) for call in answer.calls.values()]
        choice = {"index": row, "message": message, "logprobs": self._logprobs(answer.logprobs)}
        return choice | {"finish_reason": answer.finish_reason} | self._ids(answer.token_ids)

    def usage(self, usage: Usage) -> Usage:
        """See `Shape.usage`."""
        return usage

    def first_chunk(self, row: int) -> dict[str, Any]:
        """Who is speaking."""
        delta = {"role": "assistant", "content": ""}
        return {"index": row, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `Shape.chunk`."""
        change: dict[str, Any] = ({"content": delta.text} if delta.text else {}) | _reasoning(delta.reasoning)
        if delta.calls:
            change["tool_calls"] = [{"index": call.position} | _call(call) for call in delta.calls]
        choice = {"index": delta.row, "delta": change, "logprobs": self._logprobs(delta.logprobs)}
        return choice | {"finish_reason": delta.finish_reason} | self._ids(delta.token_ids)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._shown.words.chat(logprobs) if self._shown.logprobs else None

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._shown.token_ids else {}


@dataclass(frozen=True)
class Echo:
    """A prompt that stands in front of its answer.

    Attributes:
        text: of the prompt.
        logprobs: of its tokens, as a choice has them.
    """

    text: str
    logprobs: dict[str, Any] | None


class CompletionShape:
    """/v1/completions.

    Args:
        shown: what the request wants to see.
        alone: it wants its prompt and nothing behind it; a token that was drawn all the same is not shown.

    Attributes:
        echoes: row -> its prompt, where the request wants it; set when the prompts have been run.
    """

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, shown: Shown, *, alone: bool = False) -> None:
        self._shown, self._alone = shown, alone
        self.echoes: dict[int, Echo] = {}

    def choice(self, row: int, answer: WholeAnswer) -> dict[str, Any]:
        """See `Shape.choice`."""
        answer = WholeAnswer(finish_reason="length") if self._alone else answer
        text, logprobs = answer.text, self._logprobs(row, answer.logprobs)
        if (echo := self.echoes.get(row)) is not None:
            text, logprobs = echo.text + text, joined(echo.logprobs, logprobs)
        choice = {"index": row, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        return choice | self._ids(answer.token_ids)

    def usage(self, usage: Usage) -> Usage:
        """See `Shape.usage`."""
        return replace(usage, completion_tokens=0) if self._alone else usage

    def first_chunk(self, row: int) -> dict[str, Any] | None:
        """The prompt, if it is wanted."""
        echo = self.echoes.get(row)
        return echo and {"index": row, "text": echo.text, "logprobs": echo.logprobs, "finish_reason": None}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `Shape.chunk`."""
        if self._alone:
            delta = Delta(delta.row, "", delta.finish_reason and "length")
        logprobs = self._logprobs(delta.row, delta.logprobs)
        choice = {"index": delta.row, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return choice | self._ids(delta.token_ids)

    def _logprobs(self, row: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._shown.logprobs:
            return None
        return self._shown.words.completion(logprobs, shift=len(self.echoes[row].text) if row in self.echoes else 0)

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._shown.token_ids else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        },
    }


def timings_body(timing: Timing) -> dict[str, float]:
    """Seconds and speed: an addition of this server, beside `usage`."""
    return {
        "queue_seconds": round(timing.queue_seconds, 6),
        "prefill_seconds": round(timing.prefill_seconds, 6),
        "first_token_seconds": round(timing.first_token_seconds, 6),
        "decode_seconds": round(timing.decode_seconds, 6),
        "tokens_per_second": round(timing.tokens_per_second, 3),
    }
