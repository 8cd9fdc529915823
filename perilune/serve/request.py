"""What goes into generation and what comes out of it: the types shared by generator, engine and HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perilune.errors import RequestError

FinishReason = Literal["stop", "length"]


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


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one answer.

    Attributes:
        row: which answer of the batch.
        text: what became certain; may be empty on the last delta.
        finish_reason: None until the answer's last delta; "stop" = end token or stop string, "length" = max_tokens.
    """

    row: int
    text: str
    finish_reason: FinishReason | None = None


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
