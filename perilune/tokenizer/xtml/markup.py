"""The vocabulary of the chat format: markers, text pieces, media places, and how they become ids.

An element is `<|open|>tag key="value"<|sep|> body <|close|>tag<|sep|>`; only the four markers are control tokens
(architecture §10.2). A prompt is a list of *segments*. Each is encoded on its own: a `Marker` becomes its control id,
every string (tag names, pieces of attributes, all text of a message) goes through `Tokenizer.encode`, which cannot
produce one. A prompt is never joined to a string and encoded again: that is the injection barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perilune.tokenizer.interface import Tokenizer


@dataclass(frozen=True, slots=True)
class Marker:
    """A control token, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Image:
    """The place of the `index`-th image of a conversation, counted from 0 in message order."""

    index: int


@dataclass(frozen=True, slots=True)
class Video:
    """The place of the `index`-th video of a conversation, counted from 0 in message order."""

    index: int


Segment = str | Marker | Image | Video

OPEN = Marker("<|open|>")
CLOSE = Marker("<|close|>")
SEP = Marker("<|sep|>")
END_OF_MSG = Marker("<|end_of_msg|>")


def open_tag(tag: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """`<|open|>tag key="value" …<|sep|>`, in the published pieces: tag, ` key`, `="`, escaped value, `"`."""
    pieces: list[Segment] = [OPEN, tag]
    for key, value in (attributes or {}).items():
        pieces += [f" {key}", '="', escape(value), '"']
    return [*pieces, SEP]


def close_tag(tag: str) -> list[Segment]:
    """`<|close|>tag<|sep|>`."""
    return [CLOSE, tag, SEP]


def escape(value: str) -> str:
    """An attribute's value as it is written: `&` first, then `"`. Bodies are never escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(written: str) -> str:
    """Inverse of `escape`; other entities stay as they are."""
    return written.replace("&quot;", '"').replace("&amp;", "&")


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of text segments and markers, each segment on its own.

    Media places must have been replaced before (`perilune.tokenizer.xtml.media.expand`).

    Raises:
        RequestError: a text with a lone surrogate.
    """
    return [token_id for ids in encode_each(tokenizer, segments) for token_id in ids]


def encode_each(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[list[int]]:
    """Ids of every segment, a list a segment (shared by equal segments); arguments and errors as `encode_segments`."""
    segments = list(segments)
    # A conversation repeats its tags and attributes thousands of times: each different text is encoded once.
    texts = list(dict.fromkeys(segment for segment in segments if isinstance(segment, str)))
    ids_of = dict(zip(texts, tokenizer.encode_batch(texts)))
    control = {name: [token_id] for name, token_id in tokenizer.special.ids.items()}
    out: list[list[int]] = []
    for segment in segments:
        assert isinstance(segment, (str, Marker)), f"{segment} must be expanded before it is encoded"
        out.append(control[segment.name] if isinstance(segment, Marker) else ids_of[segment])
    return out
