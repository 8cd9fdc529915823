"""From drawn ids to the text that may be shown: whole characters, one channel at a time, nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.serve.stops import StopMatcher
from perilune.tokenizer import StreamDecoder, Tokenizer
from perilune.tokenizer.chat import Delta as ChannelText
from perilune.tokenizer.chat import ResponseParser


class TextReader:
    """Reads a continuation: all of it is text.

    Attributes:
        text: everything released so far.
        reasoning: always empty; chat output has two channels.
        stopped: a stop string ended the text.
    """

    reasoning = ""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    def push(self, token_id: int) -> tuple[str, str]:
        """(text, reasoning) that became certain with this id."""
        piece = self._matcher.push(self._decoder.push(token_id))
        self.text += piece
        return piece, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, when the output ends here."""
        piece = self._matcher.push(self._decoder.finish()) + self._matcher.finish()
        self.text += piece
        return piece, ""


class ChatReader:
    """Reads an assistant message: response text and reasoning; stop strings apply to the response only.

    Attributes:
        text, reasoning: everything released so far.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, thinking: bool) -> None:
        self._parser = ResponseParser(tokenizer, thinking=thinking)
        self._matcher = StopMatcher(stops)
        self.text = ""
        self.reasoning = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    def push(self, token_id: int) -> tuple[str, str]:
        """(text, reasoning) that became certain with this id."""
        return self._take(self._parser.push(token_id))

    def finish(self) -> tuple[str, str]:
        """What was held back, when the output ends here."""
        text, reasoning = self._take(self._parser.finish()[0])
        last = self._matcher.finish()
        self.text += last
        return text + last, reasoning

    def _take(self, deltas: Sequence[ChannelText]) -> tuple[str, str]:
        if not deltas:
            return "", ""
        text = "".join([self._matcher.push(d.text) for d in deltas if d.channel == "response"])
        reasoning = "".join([d.text for d in deltas if d.channel == "think"])
        self.text += text
        self.reasoning += reasoning
        return text, reasoning


Reader = TextReader | ChatReader
