"""What every tokenizer offers, and how ids become text again.

Text goes in through `encode`, which cannot produce a control token, whatever the text says: control ids are put in by
the code that knows it wants one (`tokenizer.special.open`). That is the injection barrier of the chat format.
Bytes, not characters, are the unit underneath: each ordinary id stands for a fixed byte string, so any id sequence has
exactly one byte string, and any byte string, UTF-8 or not, survives `encode_bytes` and `decode_bytes` unchanged.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from perilune.errors import RequestError
from perilune.tokenizer.special import SpecialTokens


class Tokenizer(ABC):
    """A byte-complete tokenizer with a block of control tokens.

    Attributes:
        vocab_size: one more than the largest id.
        special: the control tokens.
        fingerprint: sha256 hex of everything that decides the ids; equal fingerprints give equal ids.
    """

    vocab_size: int
    special: SpecialTokens
    fingerprint: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, never a control id. RequestError for a text with a lone surrogate (not encodable)."""

    @abstractmethod
    def byte_id(self, byte: int) -> int:
        """The id that stands for one single byte, 0 to 255."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an ordinary id; empty for a control id. RequestError for an id outside the vocabulary."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write to a file (atomically) that `load_tokenizer` reads back."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; a control token spelled out in the text becomes ordinary ids."""
        return self.encode_batch([text])[0]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of arbitrary bytes: UTF-8 runs like `encode`, each other byte as its own id. Lossless."""
        ids: list[int] = []
        while data:
            try:
                return ids + self.encode(data.decode("utf-8"))
            except UnicodeDecodeError as error:
                ids += self.encode(data[: error.start].decode("utf-8"))
                ids += [self.byte_id(byte) for byte in data[error.start : error.end]]
                data = data[error.end :]
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the ordinary ids, control ids skipped: the exact inverse of `encode` and `encode_bytes`."""
        return b"".join(self.token_bytes(token_id) for token_id in ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        A control id ends the run of bytes around it, so the two halves of a character never join across one. It is
        left out, or written by name when `skip_special` is False.
        """
        stream = StreamDecoder(self, skip_special=skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def byte_lengths(self) -> list[int]:
        """Bytes of every id of the vocabulary; 0 for control ids."""
        return [0 if i in self.special else len(self.token_bytes(i)) for i in range(self.vocab_size)]

    def piece(self, token_id: int) -> str:
        """One id for display: a control token's name, or the text of its bytes with other bytes as `\\xNN`."""
        if token_id in self.special:
            return self.special.name(token_id)
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")


class StreamDecoder:
    """Turns ids into text one at a time, holding back the bytes of an unfinished character.

    The pushed pieces and `finish()` joined equal `tokenizer.decode(ids)`; no piece contains half a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; often empty in the middle of a character."""
        if token_id in self._tokenizer.special:
            name = "" if self._skip_special else self._tokenizer.special.name(token_id)
            return self.finish() + name
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Text of the bytes still held back (U+FFFD for an unfinished character); the decoder is then empty."""
        return self._utf8.decode(b"", final=True)


def encodable(text: str) -> bytes:
    """UTF-8 bytes of `text`; RequestError that names the position of a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has the lone surrogate {text[error.start]!a} at character {error.start}, which is not valid "
            "Unicode; pass bytes to encode_bytes, or replace it"
        ) from None
