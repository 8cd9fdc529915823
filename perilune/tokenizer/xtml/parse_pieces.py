"""From output ids to whole pieces: text, tags, stops. What may still become another piece is held back."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from perilune.tokenizer.interface import Tokenizer
from perilune.tokenizer.xtml.events import Problem
from perilune.tokenizer.xtml.parse_tag import LONGEST_TAG, Tag, may_be_tag, read_tag


@dataclass(frozen=True, slots=True)
class TagPiece:
    """A whole tag; `closing` if it began with `<|close|>`."""

    tag: Tag
    closing: bool


@dataclass(frozen=True, slots=True)
class StopPiece:
    """A token that ends the message."""

    token_id: int


Piece = str | TagPiece | StopPiece | Problem


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an assistant's message: `<|end_of_msg|>`, and `[EOS]`, which is all that a base model knows."""
    return (tokenizer.special.end_of_msg, tokenizer.special.eos)


class PieceReader:
    """Reads ids one at a time. A control id ends the run of text before it, so half a character never joins across one.

    Attributes:
        bad_bytes: some bytes were not UTF-8; U+FFFD stands for them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stops = stop_ids(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tag: bytearray | None = None
        self._closing = False
        self.bad_bytes = False

    @property
    def in_tag(self) -> bool:
        """Whether the next id may belong to a tag."""
        return self._tag is not None

    def push(self, token_id: int) -> list[Piece]:
        """Pieces that became certain with this id. RequestError for an id outside the vocabulary."""
        special = self._tokenizer.special
        if token_id not in special:
            return self._bytes(self._tokenizer.token_bytes(token_id))
        if token_id == special.sep and self._tag is not None:
            return self._end_tag(bytes(self._tag))
        pieces = self.cut()
        if token_id in (special.open, special.close):
            self._tag, self._closing = bytearray(), token_id == special.close
        elif token_id in self._stops:
            pieces.append(StopPiece(token_id))
        else:
            pieces.append(Problem(f"{special.name(token_id)} means nothing here"))
        return pieces

    def cut(self) -> list[Piece]:
        """Text that was held back, when a control id or the end of the output follows; an unfinished tag is dropped."""
        pieces: list[Piece] = []
        if self._tag is not None:
            self._tag = None
            pieces.append(Problem("a tag that is not finished"))
        return pieces + self._run(b"", final=True)

    def _bytes(self, data: bytes) -> list[Piece]:
        if self._tag is None:
            return self._run(data)
        self._tag += data
        whole = bytes(self._tag)
        text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(whole)
        return [] if len(whole) <= LONGEST_TAG and may_be_tag(text) else self._no_tag(whole)

    def _no_tag(self, whole: bytes, *, final: bool = False) -> list[Piece]:
        self._tag = None
        return [Problem("a marker that begins no tag"), *self._run(whole, final=final)]

    def _run(self, data: bytes, *, final: bool = False) -> list[Piece]:
        """Bytes of a run of text; the half of a character at its end is held back unless the run ends here."""
        before = self._utf8.getstate()[0]
        text = self._utf8.decode(data, final)
        if "\ufffd" in text:
            raw = before + data
            self.bad_bytes |= raw[: len(raw) - len(self._utf8.getstate()[0])] != text.encode()
        return [text] if text else []

    def _end_tag(self, whole: bytes) -> list[Piece]:
        text = whole.decode("utf-8", errors="replace")
        if not may_be_tag(text):  # half a character at its end
            return self._no_tag(whole, final=True)
        self._tag = None
        self.bad_bytes |= whole != text.encode()
        return [TagPiece(read_tag(text), self._closing)]
