"""What an assistant's output says, piece by piece: the events of the parser.

The order is that of the output. Texts arrive in pieces, so two event lists say the same if they agree once neighbouring
pieces are joined (`joined`). `call` counts the calls of a message from 0, in output order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Channel = Literal["think", "response"]
"""Channels whose text is for people; tool calls are the third channel."""


@dataclass(frozen=True, slots=True)
class ChannelBegin:
    """A channel is open; once for each channel of a message."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class Text:
    """Whole characters of a channel, never empty, never a piece of a tag."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins.

    Attributes:
        tool: its name, unescaped, never empty.
        index: as written; "" if there was none.
        declared: whether the request declared a tool of this name.
    """

    call: int
    tool: str
    index: str
    declared: bool


@dataclass(frozen=True, slots=True)
class ArgumentBegin:
    """An argument begins. `type` is as written; a missing one reads "string"."""

    call: int
    key: str
    type: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """A piece of an argument of type string, as it arrives."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class ArgumentEnd:
    """An argument is whole.

    Attributes:
        value: the text of a string; else what the JSON text says, or that text itself where it is not JSON.
        valid: whether the text was JSON of the argument's type.
    """

    call: int
    key: str
    value: Any
    valid: bool


@dataclass(frozen=True, slots=True)
class RawArguments:
    """A piece of a `json` block: arguments that were no JSON object when they were rendered; no model output has it."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended; `whole` is False if a tag of it was missing. A call that the output's end cuts has no `CallEnd`."""

    call: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """The output left the grammar here (`perilune.tokenizer.xtml.grammar`); what could be understood was kept."""

    what: str


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """The last event; `stop_id` is None if the output was cut before a stop token."""

    stop_id: int | None


Event = (
    ChannelBegin | Text | CallBegin | ArgumentBegin | ArgumentText | ArgumentEnd | RawArguments | CallEnd | Problem | MessageEnd
)  # fmt: skip


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """The events with neighbouring pieces of one text joined."""
    held: Text | ArgumentText | RawArguments | None = None
    for event in events:
        if isinstance(event, Text) and isinstance(held, Text) and event.channel == held.channel:
            held = Text(held.channel, held.text + event.text)
            continue
        if isinstance(event, ArgumentText) and isinstance(held, ArgumentText) and event.call == held.call:
            held = ArgumentText(held.call, held.text + event.text)
            continue
        if isinstance(event, RawArguments) and isinstance(held, RawArguments) and event.call == held.call:
            held = RawArguments(held.call, held.text + event.text)
            continue
        if held is not None:
            yield held
            held = None
        if isinstance(event, (Text, ArgumentText, RawArguments)):
            held = event
        else:
            yield event
    if held is not None:
        yield held
