"""What a drawn picture is, and what a kind of picture must say about itself.

A picture is decided by its *attributes* alone, a small table of plain values: the generator of random numbers chooses
the attributes, and drawing adds nothing to them. Two pictures with equal attributes are equal pixel for pixel, so what
was held out can be said in terms of attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """Something to ask about a picture, and the only right answer.

    Attributes:
        about: short name of what is asked, the same for all wordings.
        text: the question.
        answer: the answer, as it is trained and as it is marked.
    """

    about: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture with everything that is known about it.

    Attributes:
        kind: name of the kind that drew it.
        index: its number in the sequence of its seed and part.
        part: train | held_out | unseen, see `perilune.data.drawn.parts`.
        image: RGB.
        captions: sentences that are true of it; the first is the answer to "what is this?".
        questions: what can be asked, at least one.
        attributes: what decided it.
    """

    kind: str
    index: int
    part: str
    image: Image
    captions: tuple[str, ...]
    questions: tuple[Question, ...]
    attributes: Attributes


class Kind(Protocol):
    """A kind of picture."""

    name: str

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """Choose what a picture of `width` x `height` pixels shows."""
        ...

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """The part of the attributes of which some values are kept out of training altogether; () = none."""
        ...

    def picture(self, attributes: Attributes) -> Image:
        """Draw."""
        ...

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """Sentences about the picture; the first is the answer to "what is this?"."""
        ...

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """What can be asked about the picture."""
        ...
