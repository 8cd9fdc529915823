"""Tool calls as clients read them: the parser's events become pieces of each call's JSON arguments."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from perilune.serve.request import CallDelta
from perilune.tokenizer.xtml.events import (
    ArgumentBegin,
    ArgumentEnd,
    ArgumentText,
    CallBegin,
    CallEnd,
    Event,
    RawArguments,
)
from perilune.tokenizer.xtml.parse_value import write_json


@dataclass
class Call:
    """A call so far.

    Attributes:
        id: made up here, unique.
        arguments: JSON text; whole once `ended`.
    """

    id: str
    name: str
    arguments: str = ""
    ended: bool = False

    def message(self) -> dict[str, Any]:
        """The OpenAI form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallWriter:
    """Writes the calls of one answer while they arrive.

    A string argument is written as it comes, every other one when it is whole. The pieces of a call that has ended are
    one JSON object; a call that the answer's end cuts stays cut, so that nobody takes half of it for the whole.

    Attributes:
        calls: all calls so far.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._string = False
        self._raw = False

    def write(self, event: Event) -> CallDelta | None:
        """What an event adds to a call; None for events of the other channels, and where nothing is to be said."""
        match event:
            case CallBegin(call, tool):
                assert call == len(self.calls), f"call {call} behind {len(self.calls)} calls"
                self.calls.append(Call(f"call_{uuid.uuid4().hex[:24]}", tool))
                self._raw = False
                return CallDelta(call, "", self.calls[call].id, tool)
            case ArgumentBegin(call, key, kind):
                self._string = kind == "string"
                head = ", " if self.calls[call].arguments else "{"
                return self._add(call, f"{head}{write_json(key)}: " + ('"' if self._string else ""))
            case ArgumentText(call, text):
                return self._add(call, write_json(text)[1:-1])
            case ArgumentEnd(call, _, value):
                return self._add(call, '"' if self._string else write_json(value))
            case RawArguments(call, text):
                self._raw = True
                return self._add(call, text)
            case CallEnd(call):
                self.calls[call].ended = True
                rest = "}" if self.calls[call].arguments else "{}"
                return None if self._raw else self._add(call, rest)
            case _:
                return None

    def _add(self, call: int, text: str) -> CallDelta:
        self.calls[call].arguments += text
        return CallDelta(call, text)
