"""Answers as clients read them: choices, chunks, token counts."""

from __future__ import annotations

from typing import Any, Protocol

from perilune.serve.request import Delta, Timing, Usage


class Shape(Protocol):
    """How one endpoint writes its answers.

    Attributes:
        prefix: of an answer's id.
        object, chunk_object: names of a whole answer and of a streamed piece.
    """

    prefix: str
    object: str
    chunk_object: str

    def choice(self, row: int, text: str, reasoning: str, finish_reason: str | None) -> dict[str, Any]:
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


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, row: int, text: str, reasoning: str, finish_reason: str | None) -> dict[str, Any]:
        """See `Shape.choice`."""
        message = {"role": "assistant", "content": text} | _reasoning(reasoning)
        return {"index": row, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def first_chunk(self, row: int) -> dict[str, Any]:
        """Who is speaking."""
        delta = {"role": "assistant", "content": ""}
        return {"index": row, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `Shape.chunk`."""
        change = ({"content": delta.text} if delta.text else {}) | _reasoning(delta.reasoning)
        return {"index": delta.row, "delta": change, "logprobs": None, "finish_reason": delta.finish_reason}


class CompletionShape:
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, row: int, text: str, reasoning: str, finish_reason: str | None) -> dict[str, Any]:
        """See `Shape.choice`."""
        return {"index": row, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def first_chunk(self, row: int) -> None:
        """Nothing: there is no speaker."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `Shape.chunk`."""
        return self.choice(delta.row, delta.text, "", delta.finish_reason)


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
