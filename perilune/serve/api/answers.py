"""Answers as clients read them: choices, chunks, token counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from perilune.serve.request import CallDelta, Delta, Timing, Usage


@dataclass
class WholeAnswer:
    """All deltas of one answer together.

    Attributes:
        calls: position -> the call so far.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: dict[int, CallDelta] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Add new text."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.finish_reason = delta.finish_reason
        for call in delta.calls:
            first = self.calls.get(call.position, call)
            arguments = call.arguments if first is call else first.arguments + call.arguments
            self.calls[call.position] = CallDelta(call.position, arguments, first.id, first.name)


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

    def first_chunk(self, row: int) -> dict[str, Any] | None:
        """What comes before any text."""
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

    def choice(self, row: int, answer: WholeAnswer) -> dict[str, Any]:
        """See `Shape.choice`. Beside calls an empty text is null, as clients expect."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text} | _reasoning(answer.reasoning)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_call(call) for call in answer.calls.values()]
        return {"index": row, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}

    def first_chunk(self, row: int) -> dict[str, Any]:
        """Who is speaking."""
        delta = {"role": "assistant", "content": ""}
        return {"index": row, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `Shape.chunk`."""
        change: dict[str, Any] = ({"content": delta.text} if delta.text else {}) | _reasoning(delta.reasoning)
        if delta.calls:
            change["tool_calls"] = [{"index": call.position} | _call(call) for call in delta.calls]
        return {"index": delta.row, "delta": change, "logprobs": None, "finish_reason": delta.finish_reason}


class CompletionShape:
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, row: int, answer: WholeAnswer) -> dict[str, Any]:
        """See `Shape.choice`."""
        return {"index": row, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}

    def first_chunk(self, row: int) -> None:
        """Nothing: there is no speaker."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `Shape.chunk`."""
        return {"index": delta.row, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_body(timing: Timing) -> dict[str, float]:
    """Seconds and speed: an addition of this server, beside `usage`."""
    return {
        "prefill_seconds": round(timing.prefill_seconds, 6),
        "decode_seconds": round(timing.decode_seconds, 6),
        "tokens_per_second": round(timing.tokens_per_second, 3),
    }
