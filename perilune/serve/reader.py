"""From drawn ids to what may be shown: whole characters, one channel at a time, nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.serve.calls import CallWriter
from perilune.serve.request import CallDelta
from perilune.serve.stops import StopMatcher
from perilune.tokenizer import StreamDecoder, Tokenizer
from perilune.tokenizer.xtml.events import Event, Text
from perilune.tokenizer.xtml.parse import Parser


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: text of the answer, of its reasoning, and of its calls (at most one piece a call)."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def __add__(self, later: Piece) -> Piece:
        return Piece(self.text + later.text, self.reasoning + later.reasoning, _joined(self.calls + later.calls))


def _joined(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    joined: dict[int, CallDelta] = {}
    for call in calls:
        first = joined.get(call.position)
        joined[call.position] = (
            call if first is None else CallDelta(call.position, first.arguments + call.arguments, first.id, first.name)
        )
    return tuple(joined.values())


class TextReader:
    """Reads a continuation: all of it is text.

    Attributes:
        text: everything released so far.
        called: always False; chat output can call tools.
        stopped: a stop string ended the text.
    """

    called = False

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    def push(self, token_id: int) -> Piece:
        """What became certain with this id."""
        return self._take(self._matcher.push(self._decoder.push(token_id)))

    def finish(self) -> Piece:
        """What was held back, when the output ends here."""
        return self._take(self._matcher.push(self._decoder.finish()) + self._matcher.finish())

    def _take(self, text: str) -> Piece:
        self.text += text
        return Piece(text)


class ChatReader:
    """Reads an assistant message: response, reasoning, tool calls. Stop strings apply to the response only.

    Args:
        tokenizer: of the ids.
        stops: strings that end the answer.
        thinking: which tag the prompt has left open.
        tools: names of the declared tools.
        show_calls: whether the client gets calls at all; those of a request without tools, or with `tool_choice` none,
            are read and dropped.

    Attributes:
        text, reasoning: everything released so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        thinking: bool,
        tools: Iterable[str] = (),
        show_calls: bool = True,
    ) -> None:
        self._parser = Parser(tokenizer, thinking=thinking, tools=frozenset(tools))
        self._matcher = StopMatcher(stops)
        self._writer = CallWriter()
        self._show_calls = show_calls
        self.text = ""
        self.reasoning = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    @property
    def called(self) -> bool:
        """Whether the client got a whole tool call."""
        return any(call.ended for call in self._writer.calls)

    def push(self, token_id: int) -> Piece:
        """What became certain with this id."""
        return self._take(self._parser.push([token_id]))

    def finish(self) -> Piece:
        """What was held back, when the output ends here."""
        piece = self._take(self._parser.finish())
        last = self._matcher.finish()
        self.text += last
        return piece + Piece(last)

    def message(self) -> dict[str, Any]:
        """The answer as the client will send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "reasoning_content": self.reasoning}
        calls = [call.message() for call in self._writer.calls]
        return message | ({"tool_calls": calls} if calls else {})

    def _take(self, events: Sequence[Event]) -> Piece:
        if not events:
            return Piece()
        text, reasoning = "", ""
        calls: list[CallDelta] = []
        for event in events:
            if isinstance(event, Text):
                if event.channel == "think":
                    reasoning += event.text
                else:
                    text += self._matcher.push(event.text)
            elif self._show_calls and (call := self._writer.write(event)) is not None:
                calls.append(call)
        self.text += text
        self.reasoning += reasoning
        return Piece(text, reasoning, _joined(calls))


Reader = TextReader | ChatReader
