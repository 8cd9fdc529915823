"""Pictures of one object, and of two with a place for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.drawn import objects
from perilune.data.drawn.canvas import Canvas, paper
from perilune.data.drawn.drawing import Attributes, Question

if TYPE_CHECKING:
    from PIL.Image import Image

WHAT = (
    "what is this?", "What is this?", "What do you see?", "what is in the picture?", "What does the image show?",
    "Describe the image.",
)  # fmt: skip
"""Wordings of the question for everything that there is."""


class OneShape:
    """One object anywhere on plain paper: shape x colour x place x size."""

    name = "shape"

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`. The radius is 0.25 to 0.45 of the shorter side; the object lies wholly inside."""
        radius = float(rng.uniform(0.25, 0.45)) * min(width, height)
        x, y = (float(rng.uniform(radius, side - radius)) for side in (width, height))
        thing = objects.choose(rng, x, y, radius)
        return {"width": width, "height": height, "paper": paper(rng, [thing["paint"]]), "object": thing}

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """Shape and colour."""
        return attributes["object"]["shape"], attributes["object"]["colour"]

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        canvas = Canvas(attributes["width"], attributes["height"], attributes["paper"])
        objects.paint(canvas, attributes["object"], attributes["paper"])
        return canvas.finish()

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """Colour and shape, in either order: what comes first is said from the picture alone."""
        thing = attributes["object"]
        return objects.with_article(objects.name(thing)), f"{objects.with_article(thing['shape'])} in {thing['colour']}"

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """What it is, its shape, its colour, its size."""
        thing, sides = attributes["object"], (attributes["width"], attributes["height"])
        large = thing["radius"] > 0.35 * min(sides)
        return (
            *(Question("what", text, self.captions(attributes)[0]) for text in WHAT),
            Question("shape", "What shape is it?", objects.with_article(thing["shape"])),
            Question("colour", "What colour is it?", thing["colour"]),
            Question("size", "Is it large or small?", "large" if large else "small"),
        )


class TwoShapes:
    """Two objects that differ in shape and colour and do not touch, side by side or one above the other."""

    name = "shapes"

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`. Each object has a half of the picture for itself."""
        above = bool(rng.random() < 0.5)
        half = (width, height / 2) if above else (width / 2, height)
        things: list[dict[str, Any]] = []
        for number in range(2):
            while True:
                radius = float(rng.uniform(0.3, 0.46)) * min(half)
                x, y = (float(rng.uniform(radius, side - radius)) for side in half)
                x, y = (x, y + number * half[1]) if above else (x + number * half[0], y)
                thing = objects.choose(rng, x, y, radius)
                if all(thing["shape"] != t["shape"] and thing["colour"] != t["colour"] for t in things):
                    break
            things.append(thing)
        background = paper(rng, [thing["paint"] for thing in things])
        return {"width": width, "height": height, "paper": background, "above": above, "objects": things}

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """The two pairs of shape and colour."""
        return tuple((thing["shape"], thing["colour"]) for thing in attributes["objects"])

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        canvas = Canvas(attributes["width"], attributes["height"], attributes["paper"])
        for thing in attributes["objects"]:
            objects.paint(canvas, thing, attributes["paper"])
        return canvas.finish()

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """Both objects and how they lie."""
        first, second = (objects.with_article(objects.name(thing)) for thing in attributes["objects"])
        return (f"{first} {'above' if attributes['above'] else 'to the left of'} {second}",)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """All of it; the colour of one by its shape; the shape of one by its colour."""
        first, second = attributes["objects"]
        return (
            *(Question("what", text, self.captions(attributes)[0]) for text in WHAT),
            Question("colour of", f"What colour is the {first['shape']}?", first["colour"]),
            Question("colour of", f"What colour is the {second['shape']}?", second["colour"]),
            Question("shape of", f"What shape is {first['colour']}?", first["shape"]),
            Question("shape of", f"What shape is {second['colour']}?", second["shape"]),
        )
