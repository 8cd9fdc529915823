"""From drawn ids to what may be shown: whole characters, one channel at a time, nothing behind a stop string.

Log-probabilities of tokens leave together with their text: those of text that is held back, or was cut off, stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perilune.serve.calls import CallWriter
from perilune.serve.request import CallDelta, TokenLogprob
from perilune.serve.stops import StopMatcher
from perilune.tokenizer import StreamDecoder, Tokenizer
from perilune.tokenizer.xtml.events import Event, Text
from perilune.tokenizer.xtml.parse import Parser


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: text of the answer, of its reasoning, and of its calls (at most one piece a call).

    Attributes:
        logprobs: of the tokens that `text` is made of.
        token_ids: all tokens since the last piece that had anything to show.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs or self.token_ids)

    def __add__(self, later: Piece) -> Piece:
        return Piece(
            self.text + later.text, self.reasoning + later.reasoning, _joined(self.calls + later.calls),
            self.logprobs + later.logprobs, self.token_ids + later.token_ids,
        )  # fmt: skip


def _joined(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    joined: dict[int, CallDelta] = {}
    for call in calls:
        first = joined.get(call.position)
        joined[call.position] = (
            call if first is None else CallDelta(call.position, first.arguments + call.arguments, first.id, first.name)
        )
    return tuple(joined.values())


class _Waiting:
    """Tokens whose text has not left yet."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: deque[TokenLogprob] = deque()

    def add(self, token_id: int, logprob: TokenLogprob | None, offset: int | None) -> None:
        """A token; `offset` = characters in front of it, None if it is no text of the answer."""
        self._ids.append(token_id)
        if logprob is not None and offset is not None:
            self._logprobs.append(replace(logprob, offset=offset))

    def release(self, piece: Piece, released: int, *, last: bool = False) -> Piece:
        """The piece with the log-probabilities of the text up to `released` characters, and with the ids so far.

        A piece that shows nothing takes no ids, unless it is the last.
        """
        logprobs = []
        while self._logprobs and self._logprobs[0].offset < released:
            logprobs.append(self._logprobs.popleft())
        piece = replace(piece, logprobs=tuple(logprobs))
        if piece or last:
            piece = replace(piece, token_ids=tuple(self._ids))
            self._ids.clear()
        return piece


class TextReader:
    """Reads a continuation: all of it is text.

    Attributes:
        text: everything released so far.
        called: always False; chat output can call tools.
        reasoning_tokens: always 0.
    """

    called = False
    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._waiting = _Waiting()
        self._decoded = 0
        self._control = tokenizer.special
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """What became certain with this id."""
        self._waiting.add(token_id, logprob, None if token_id in self._control else self._decoded)
        return self._waiting.release(self._take(self._decoder.push(token_id)), len(self.text))

    def finish(self) -> Piece:
        """What was held back, when the output ends here."""
        piece = self._take(self._decoder.finish())
        held = self._matcher.finish()
        self.text += held
        return self._waiting.release(piece + Piece(held), len(self.text), last=True)

    def _take(self, text: str) -> Piece:
        self._decoded += len(text)
        certain = self._matcher.push(text)
        self.text += certain
        return Piece(certain)


class ChatReader:
    """Reads an assistant message: response, reasoning, tool calls. Stop strings apply to the response only.

    Args:
        tokenizer: of the ids.
        stops: strings that end the answer.
        include_stop: whether the string that ended it is shown.
        thinking: which tag the prompt has left open.
        tools: names of the declared tools.
        show_calls: whether the client gets calls at all; those of a request without tools, or with `tool_choice` none,
            are read and dropped.

    Attributes:
        text, reasoning: everything released so far.
        reasoning_tokens: tokens drawn while the think tag was open, the closing tag included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        thinking: bool,
        tools: Iterable[str] = (),
        show_calls: bool = True,
    ) -> None:
        self._parser = Parser(tokenizer, thinking=thinking, tools=frozenset(tools))
        self._matcher = StopMatcher(stops, include=include_stop)
        self._writer = CallWriter()
        self._show_calls = show_calls
        self._waiting = _Waiting()
        self._said = 0
        self._control = tokenizer.special
        self.text = ""
        self.reasoning = ""
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    @property
    def called(self) -> bool:
        """Whether the client got a whole tool call."""
        return any(call.ended for call in self._writer.calls)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """What became certain with this id."""
        place = self._parser.channel
        self.reasoning_tokens += self._parser.thinking
        answers = place == "response" and token_id not in self._control
        self._waiting.add(token_id, logprob, self._said if answers else None)
        return self._waiting.release(self._take(self._parser.push([token_id])), len(self.text))

    def finish(self) -> Piece:
        """What was held back, when the output ends here."""
        piece = Piece() if self.stopped else self._take(self._parser.finish())
        held = self._matcher.finish()
        self.text += held
        return self._waiting.release(piece + Piece(held), len(self.text), last=True)

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
                    self._said += len(event.text)
                    text += self._matcher.push(event.text)
            elif self._show_calls and (call := self._writer.write(event)) is not None:
                calls.append(call)
        self.text += text
        self.reasoning += reasoning
        return Piece(text, reasoning, _joined(calls))


Reader = TextReader | ChatReader
