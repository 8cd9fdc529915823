"""Cutting a stream of documents into windows of T tokens, with nothing padded and nothing dropped.

Windows follow each other without a gap; a document may begin and end anywhere in one and go on in the next. The model
restarts at each document's start (`starts`), so what stands before it in the window has no influence.

Targets are the next tokens. The end of a document, `[EOS]`, is predicted like any token. What comes after it, the next
document's first token, is not: its target is -100, because no context could tell it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.data.image import ProcessedImage
from perilune.data.shards import TokenStream

IGNORE = -100
"""Target of a position that is not trained or scored."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a row of tokens.

    Attributes:
        position: of its first media pad; the others follow without a gap.
        image: what the tower gets.
    """

    position: int
    image: ProcessedImage


@dataclass(frozen=True, slots=True)
class Window:
    """T positions of a stream.

    Attributes:
        ids: int64 `[T]`.
        targets: int64 `[T]`, -100 where nothing is predicted.
        starts: bool `[T]`, True at the first token of each document.
        images: those whose media pads stand in `ids`, in order; each lies wholly inside the window.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.bool_]
    images: tuple[PlacedImage, ...] = ()


def window(stream: TokenStream, start: int, length: int) -> Window:
    """The window of `length` tokens from stream position `start`; `start + length < stream.num_tokens`."""
    tokens = stream.read(start, start + length + 1)
    assert len(tokens) == length + 1, f"window {start}+{length} passes the end of {stream.num_tokens} tokens"
    first = begins(stream, start, length + 1)
    return Window(tokens[:-1], np.where(first[1:], IGNORE, tokens[1:]), first[:-1])


def begins(stream: TokenStream, start: int, length: int) -> NDArray[np.bool_]:
    """bool `[length]`: which positions from `start` on are the first token of a document."""
    low, high = np.searchsorted(stream.offsets, [start, start + length])
    mask = np.zeros(length, dtype=np.bool_)
    mask[stream.offsets[low:high] - start] = True
    return mask


def count_windows(stream: TokenStream, length: int) -> int:
    """Whole windows of `length` tokens, each with a next token for its last position."""
    return max(0, stream.num_tokens - 1) // length
