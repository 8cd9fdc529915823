"""A parsed output as a whole: what was thought, said and called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.tokenizer.xtml.events import (
    ArgumentEnd,
    CallBegin,
    CallEnd,
    ChannelBegin,
    Event,
    MessageEnd,
    Problem,
    RawArguments,
    Text,
)
from perilune.tokenizer.xtml.parse_value import write_json


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an output.

    Attributes:
        tool: name.
        index: as written.
        declared: whether the request declared the tool.
        complete: whether every tag of the call is there; a cut call must not be executed.
        arguments: key -> value of the whole arguments, in the order written; of a repeated key the last value.
        raw: text of a `json` block, which stands for arguments that are no JSON object; then `arguments` is empty.
    """

    tool: str
    index: str
    declared: bool
    complete: bool
    arguments: dict[str, Any]
    raw: str | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as clients read them: JSON text, or the raw text."""
        return write_json(self.arguments) if self.raw is None else self.raw


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An assistant's output.

    Attributes:
        reasoning: text of the think channel; None if there was none.
        content: text of the response; None if the output ended before one.
        tool_calls: in output order, cut ones and undeclared ones included.
        finished: whether a stop token was seen (False: cut by a length limit).
        problems: where the output left the grammar; empty exactly for outputs that it allows.
    """

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finished: bool
    problems: tuple[str, ...] = ()

    @property
    def undeclared_tools(self) -> tuple[str, ...]:
        """Names that were called but not declared."""
        return tuple(call.tool for call in self.tool_calls if not call.declared)

    def to_message(self, call_ids: Sequence[str] | None = None) -> dict[str, Any]:
        """The OpenAI form, which the renderer turns into the ids that were parsed; cut calls are left out.

        Args:
            call_ids: ids of the calls; default `name:position`.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        calls = [call for call in self.tool_calls if call.complete]
        if calls:
            message["tool_calls"] = [
                {
                    "id": call_ids[position] if call_ids else f"{call.tool}:{position}",
                    "type": "function",
                    "function": {"name": call.tool, "arguments": call.arguments_json},
                }
                for position, call in enumerate(calls)
            ]
        return message


@dataclass
class _Call:
    begin: CallBegin
    arguments: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    complete: bool = False


def collect(events: Iterable[Event]) -> ParsedMessage:
    """The message that a parser's events describe."""
    texts: dict[str, list[str]] = {}
    calls: list[_Call] = []
    problems: list[str] = []
    finished = False
    for event in events:
        match event:
            case ChannelBegin(channel):
                texts[channel] = []
            case Text(channel, text):
                texts[channel].append(text)
            case CallBegin():
                calls.append(_Call(event))
            case ArgumentEnd(call, key, value):
                calls[call].arguments[key] = value
            case RawArguments(call, text):
                calls[call].raw = (calls[call].raw or "") + text
            case CallEnd(call, whole):
                calls[call].complete = whole
            case Problem(what):
                problems.append(what)
            case MessageEnd(stop_id):
                finished = stop_id is not None
            case _:
                pass
    return ParsedMessage(
        reasoning="".join(texts["think"]) if "think" in texts else None,
        content="".join(texts["response"]) if "response" in texts else None,
        tool_calls=tuple(
            ToolCall(c.begin.tool, c.begin.index, c.begin.declared, c.complete, c.arguments, c.raw) for c in calls
        ),
        finished=finished,
        problems=tuple(problems),
    )
