"""Where things are, in numbers: boxes and points, in pixels of the original picture and in [0, 1] of its sides.

The question says which of the two is meant, and the framing of every picture tells its width and height, so that one
can be computed from the other (report §3.1: coordinates are supervised both absolute and normalised). x runs to the
right and y down from the outer corner of the first pixel; a box is `left top right bottom`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.drawn import objects
from perilune.data.drawn.drawing import Attributes, Question
from perilune.data.drawn.shapes import OneShape, TwoShapes

if TYPE_CHECKING:
    from PIL.Image import Image


def in_pixels(values: Sequence[float]) -> str:
    """Coordinates in pixels as whole numbers: "12 30 44 60"."""
    return " ".join(str(round(value)) for value in values)


def in_unit(values: Sequence[float], width: int, height: int) -> str:
    """Coordinates x, y, x, y … as shares of the sides with two decimals: "0.21 0.54 0.79 1.00"."""
    sides = (width, height)
    return " ".join(f"{min(1.0, max(0.0, value / sides[n % 2])):.2f}" for n, value in enumerate(values))


class Grounding:
    """One or two objects; asked for are the box or the centre point of one of them, in either convention."""

    def __init__(self, name: str) -> None:
        """`name`: boxes | points."""
        assert name in ("boxes", "points"), name
        self.name = name

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`."""
        if rng.random() < 0.5:
            one = OneShape().attributes(rng, width, height)
            return {key: value for key, value in one.items() if key != "object"} | {"objects": [one["object"]]}
        return TwoShapes().attributes(rng, width, height)

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """The pairs of shape and colour."""
        return TwoShapes().combination(attributes)

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        return TwoShapes().picture(attributes)

    def where(self, thing: Attributes) -> tuple[float, ...]:
        """What is asked about an object, in pixels: its box, or its centre, which is that of the box."""
        left, top, right, bottom = objects.box(thing)
        return (left, top, right, bottom) if self.name == "boxes" else ((left + right) / 2, (top + bottom) / 2)

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """Every object with its box or point in [0, 1]."""
        sides = (attributes["width"], attributes["height"])
        things = [f"{objects.name(thing)} at {in_unit(self.where(thing), *sides)}" for thing in attributes["objects"]]
        return (", ".join(things),)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """Box or point of each object, in pixels and in [0, 1]."""
        sides = (attributes["width"], attributes["height"])
        word = "box" if self.name == "boxes" else "centre"
        asked = []
        for thing in attributes["objects"]:
            what = f"{word} of the {objects.name(thing)}"
            asked += [
                Question("pixels", f"Give the {what} in pixels.", in_pixels(self.where(thing))),
                Question("unit", f"Give the {what} in [0, 1].", in_unit(self.where(thing), *sides)),
            ]
        return tuple(asked)
