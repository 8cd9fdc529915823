"""From output ids to events: an incremental parser of what an assistant says (architecture §10.3, §10.4).

It reads *ids*: a tag begins and ends with control ids, so text that spells a marker is text, and no visible text can hold
a marker. Half a character, and whatever may still turn out to be a tag, is held back; the events are the same however
the ids are split into pushes, and however the same bytes are split into ids.

An output that leaves the grammar is read as far as it makes sense; each departure is a `Problem`. Where the two engines
that serve the published model differ, or leave a case open, this parser chooses:

- Spaces inside a tag are tolerated (vLLM), so a tag is a tag whatever its spacing.
- Arguments of type string are events as they arrive; the engines send a call when it is whole, which makes a client wait
  in silence for a long file (open request at vLLM).
- `<|open|>` or `<|close|>` without `<|sep|>`: if what follows cannot be a tag, it is text again (vLLM: everything but the
  marker is text); if the output is cut while it may be one, it is dropped (SGLang drops `<|open|>think` and the like).
- A response or a tools element that opens while think is still open ends think (vLLM for the response; for tools neither
  says), and a call outside `tools` is a call: an answer must not vanish because one tag is missing.
- Text behind a closed think without an opened response is response, but for spaces in front of it.
- A call without a name is dropped (both). A call that the output's end cuts has no `CallEnd`, and its whole arguments
  count; a call that another tag cuts is ended there as not whole (the engines drop both).
- A second message, or text outside every channel, is dropped (vLLM strips such markers and keeps the text).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from perilune.tokenizer.interface import Tokenizer
from perilune.tokenizer.xtml.events import (
    ArgumentBegin,
    ArgumentEnd,
    ArgumentText,
    CallBegin,
    CallEnd,
    Channel,
    ChannelBegin,
    Event,
    MessageEnd,
    Problem,
    RawArguments,
    Text,
)
from perilune.tokenizer.xtml.parse_pieces import Piece, PieceReader, StopPiece
from perilune.tokenizer.xtml.parse_result import ParsedMessage, collect
from perilune.tokenizer.xtml.parse_tag import Tag
from perilune.tokenizer.xtml.parse_value import TYPES, read_value

_IN_CALL = ("call", "argument", "json")


def parse(tokenizer: Tokenizer, ids: Iterable[int], *, thinking: bool, tools: Collection[str] = ()) -> ParsedMessage:
    """Parse a whole output; arguments as `Parser`."""
    parser = Parser(tokenizer, thinking=thinking, tools=tools)
    return collect([*parser.push(ids), *parser.finish()])


class Parser:
    """Reads an assistant's output while it is drawn. What it says about departures: see the module.

    Args:
        tokenizer: of the ids.
        thinking: which tag the prompt has left open: think, or else response.
        tools: names of the tools that the request declares.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, tools: Collection[str] = ()) -> None:
        self._special = tokenizer.special
        self._pieces = PieceReader(tokenizer)
        self._tools = frozenset(tools)
        self._events: list[Event] = []
        # Where the next text belongs: think, response, between (think is closed, response is not open), outside,
        # tools, call, argument, json, skip (an element that means nothing here), over (the message is closed).
        self._place = ""
        self._begun: set[Channel] = set()
        self._open_channel("think" if thinking else "response")
        self._skipped, self._skipped_from = "", ""
        self._spaces = False
        self._tools_seen = False
        self._calls = 0
        self._has_arguments = False
        self._key, self._type = "", ""
        self._value: list[str] = []
        self._has_raw = False
        self._ended = False

    @property
    def thinking(self) -> bool:
        """Whether think is open; its closing tag counts as inside."""
        return self._place == "think"

    @property
    def channel(self) -> Channel | None:
        """Channel of the next ordinary id; None where it is no text for people, or part of a tag."""
        return self._place if self._place in ("think", "response") and not self._pieces.in_tag else None

    def push(self, ids: Iterable[int]) -> list[Event]:
        """Events that became certain with these ids. Ids behind a stop id are ignored.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        for token_id in ids:
            if self._ended:
                break
            for piece in self._pieces.push(token_id):
                self._read(piece)
        return self._take()

    def finish(self) -> list[Event]:
        """The last events, when the output ends here."""
        if not self._ended:
            for piece in self._pieces.cut():
                self._read(piece)
            self._stop(None)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _problem(self, what: str) -> None:
        self._events.append(Problem(what))

    def _read(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self._text(piece)
        elif isinstance(piece, Problem):
            self._events.append(piece)
        elif isinstance(piece, StopPiece):
            self._stop(piece.token_id)
        else:
            self._read_tag(piece.tag, closing=piece.closing)

    def _read_tag(self, tag: Tag, *, closing: bool) -> None:
        if not tag.canonical or (tag.attributes and (closing or tag.name not in ("call", "argument", "json"))):
            self._problem(f"the tag {tag.text[:80]!r} is not written as the format says")
        if self._place == "over":
            self._problem("text behind the closed message")
        elif closing:
            self._close(tag.name)
        else:
            self._open(tag)

    # Text

    def _text(self, text: str) -> None:
        place = self._place
        if place in ("think", "response"):
            self._events.append(Text(place, text))
        elif place == "argument":
            self._value.append(text)
            if self._type == "string":
                self._events.append(ArgumentText(self._calls - 1, text))
        elif place == "json":
            self._events.append(RawArguments(self._calls - 1, text))
        elif place == "between":
            if not self._spaces:
                self._problem("text between think and response")
                self._spaces = True
            text = text.lstrip()
            if text:
                self._open_channel("response")
                self._events.append(Text("response", text))
        elif not self._spaces:
            self._problem("text outside every channel")
            self._spaces = True

    def _open_channel(self, channel: Channel) -> None:
        self._place = channel
        if channel not in self._begun:
            self._begun.add(channel)
            self._events.append(ChannelBegin(channel))

    # Tags

    def _go(self, place: str) -> None:
        self._place, self._spaces = place, False

    def _expect(self, name: str, *places: str) -> None:
        if self._place not in places:
            self._problem(f"{name} inside {self._place}")

    def _open(self, tag: Tag) -> None:
        name = tag.name
        if self._place == "skip" and name not in ("argument", "json"):
            self._go(self._skipped_from)
        if name in ("think", "response", "tools"):
            if name == self._place:
                self._problem(f"{name} is open already")
                return
            self._expect(f"<{name}>", "between" if name == "response" else "outside" if name == "tools" else "")
            self._end_call(whole=False)
            if name == "tools":
                if self._tools_seen:
                    self._problem("a second tools element")
                self._tools_seen = True
                self._go("tools")
            else:
                if name in self._begun:
                    self._problem(f"a second {name} element")
                self._open_channel(name)
        elif name == "call":
            self._expect("<call>", "tools")
            self._end_call(whole=False)
            self._begin_call(tag)
        elif name == "argument" and self._place in ("call", "argument"):
            self._end_argument()
            self._begin_argument(tag)
        elif name == "json" and self._place == "call" and not self._has_arguments and not self._has_raw:
            self._problem("a json block, which is for prompts only")
            self._has_raw = True
            self._events.append(RawArguments(self._calls - 1, ""))
            self._go("json")
        elif name in ("argument", "json"):
            self._problem(f"<{name}> inside {self._place}")
            self._end_argument()
            self._skip(name)
        else:
            self._problem(f"<{name}> inside {self._place}")

    def _close(self, name: str) -> None:
        if self._place == "skip":
            if name == self._skipped:
                self._go(self._skipped_from)
                return
            if name not in ("call", "tools", "message"):
                self._problem(f"</{name}> inside an element without a meaning")
                return
            self._go(self._skipped_from)
        if name == "message":
            self._expect("</message>", "outside")
            self._end_call(whole=False)
            self._go("over")
        elif name == "tools" and self._place in ("tools", *_IN_CALL):
            self._expect("</tools>", "tools")
            self._end_call(whole=False)
            if not self._calls:
                self._problem("tools without a call")
            self._go("outside")
        elif name == "call" and self._place in _IN_CALL:
            self._expect("</call>", "call")
            self._end_call(whole=self._place == "call")
            self._go("tools")
        elif name == "argument" and self._place == "argument":
            self._end_argument()
        elif name == "json" and self._place == "json":
            self._go("call")
        elif name == self._place == "think":
            self._go("between")
        elif name == "response" and self._place in ("response", "between"):
            self._expect("</response>", "response")
            self._go("outside")
        else:
            self._problem(f"</{name}> inside {self._place}")

    def _skip(self, name: str) -> None:
        """Read over an element that means nothing here, up to its closing tag."""
        if self._place != "skip":
            self._skipped, self._skipped_from = name, self._place
            self._go("skip")

    def _begin_call(self, tag: Tag) -> None:
        tool, index = tag.attributes.get("tool", ""), tag.attributes.get("index", "")
        self._go("tools")
        if not tool:
            self._problem("a call without the name of a tool")
            self._skip("call")
            return
        if list(tag.attributes) != ["tool", "index"] or index != str(self._calls + 1):
            self._problem(f"the call {self._calls + 1} is written {tag.text[:80]!r}")
        if tool not in self._tools:
            self._problem(f"{tool!r} is not a declared tool")
        self._events.append(CallBegin(self._calls, tool, index, tool in self._tools))
        self._calls += 1
        self._has_arguments = self._has_raw = False
        self._go("call")

    def _end_call(self, *, whole: bool) -> None:
        if self._place in _IN_CALL:
            self._end_argument()
            self._events.append(CallEnd(self._calls - 1, whole))

    def _begin_argument(self, tag: Tag) -> None:
        self._key, self._type = tag.attributes.get("key", ""), tag.attributes.get("type", "string")
        if list(tag.attributes) != ["key", "type"] or self._type not in TYPES:
            self._problem(f"an argument is written {tag.text[:80]!r}")
        if self._has_raw:
            self._problem("an argument behind a json block")
        self._has_arguments = True
        self._value = []
        self._events.append(ArgumentBegin(self._calls - 1, self._key, self._type))
        self._go("argument")

    def _end_argument(self) -> None:
        if self._place == "argument":
            value, valid = read_value(self._type, "".join(self._value))
            if not valid:
                self._problem(f"the argument {self._key!r} is not a JSON {self._type}")
            self._events.append(ArgumentEnd(self._calls - 1, self._key, value, valid))
            self._go("call")

    def _stop(self, token_id: int | None) -> None:
        if self._pieces.bad_bytes:
            self._problem("bytes that are not UTF-8")
        if token_id is None:
            self._problem("cut before its end")
        else:
            self._expect(self._special.name(token_id), "outside", "over")
            if token_id != self._special.end_of_msg:
                self._problem(f"ended by {self._special.name(token_id)}")
        self._events.append(MessageEnd(token_id))
        self._ended = True
