"""Charts whose values can be read off: bars with letters, a line over a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.drawn.canvas import COLOURS, RGB, Canvas, paper, shade
from perilune.data.drawn.drawing import Attributes, Question
from perilune.data.drawn.fonts import load, text_fonts

if TYPE_CHECKING:
    from PIL.Image import Image

TOP_VALUE = 9
_LETTERS = "ABCDE"
_PAINTS = ("red", "green", "blue", "purple", "orange")


def _frame(rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
    """What bars and lines share: paper, paint, a font for the labels."""
    colour = _PAINTS[int(rng.integers(len(_PAINTS)))]
    paint = shade(rng, colour)
    fonts = text_fonts()
    return {"width": width, "height": height, "paper": paper(rng, [paint, COLOURS["black"]]), "paint": paint,
            "font": fonts[int(rng.integers(len(fonts)))]}  # fmt: skip


class _Axes:
    """Axes with a grid line for every third value and a label under every column, in pixels of a canvas."""

    def __init__(self, attributes: Attributes, columns: int) -> None:
        width, height = attributes["width"], attributes["height"]
        self.canvas = Canvas(width, height, attributes["paper"])
        self.ink: RGB = COLOURS["black"]
        text = max(7, height // 7)
        self.left, self.right, self.top, self.bottom = 0.06 * width, 0.97 * width, 0.06 * height, height - 1.35 * text
        self.columns = columns
        self._font = load(attributes["font"], int(self.canvas.scaled(text)[0]))
        line = max(1, round(self.canvas.scaled(height / 90)[0]))
        for value in range(0, TOP_VALUE + 1, 3):
            ends = self.canvas.scaled(self.left, self.y(value), self.right, self.y(value))
            self.canvas.draw.line(
                ends, fill=self.ink if value == 0 else (150, 150, 150), width=line if value == 0 else 1
            )
        self.canvas.draw.line(
            self.canvas.scaled(self.left, self.top, self.left, self.bottom), fill=self.ink, width=line
        )

    def x(self, column: int) -> float:
        """Middle of a column."""
        return self.left + (self.right - self.left) * (column + 0.5) / self.columns

    def y(self, value: float) -> float:
        """Height of a value."""
        return self.bottom - (self.bottom - self.top) * value / TOP_VALUE

    def label(self, column: int, text: str) -> None:
        """Write under a column."""
        place = tuple(self.canvas.scaled(self.x(column), self.bottom + 0.5))
        self.canvas.draw.text(place, text, font=self._font, fill=self.ink, anchor="mt")


class Bars:
    """Two to five bars with values 1 to 9 and a letter under each; no two bars are equally high."""

    name = "bars"

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`."""
        values = (1 + rng.permutation(TOP_VALUE)[: int(rng.integers(2, 6))]).tolist()
        return _frame(rng, width, height) | {"values": values}

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """The values in order."""
        return tuple(attributes["values"])

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        axes = _Axes(attributes, len(attributes["values"]))
        half = 0.34 * (axes.right - axes.left) / axes.columns
        for column, value in enumerate(attributes["values"]):
            corners = axes.canvas.scaled(axes.x(column) - half, axes.y(value), axes.x(column) + half, axes.y(0))
            axes.canvas.draw.rectangle(corners, fill=tuple(attributes["paint"]))
            axes.label(column, _LETTERS[column])
        return axes.canvas.finish()

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """Every bar with its value."""
        return ("bars " + ", ".join(f"{_LETTERS[n]} {value}" for n, value in enumerate(attributes["values"])),)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """The height of each bar, and which is the highest."""
        values = attributes["values"]
        return (
            Question("what", "what is this?", self.captions(attributes)[0]),
            *(Question("value", f"How high is bar {_LETTERS[n]}?", str(value)) for n, value in enumerate(values)),
            Question("highest", "Which bar is the highest?", _LETTERS[values.index(max(values))]),
        )


class Line:
    """A line through five values 0 to 9 at 1, 2, … 5; first and last differ."""

    name = "line"

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`."""
        values = rng.integers(0, TOP_VALUE + 1, 5)
        values[4] = (values[0] + 1 + rng.integers(TOP_VALUE)) % (TOP_VALUE + 1)
        return _frame(rng, width, height) | {"values": values.tolist()}

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """The values in order."""
        return tuple(attributes["values"])

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        values = attributes["values"]
        axes = _Axes(attributes, len(values))
        points = np.array([(axes.x(n), axes.y(value)) for n, value in enumerate(values)])
        (thick, dot) = axes.canvas.scaled(attributes["height"] / 32, attributes["height"] / 28)
        axes.canvas.draw.line(
            axes.canvas.points(points), fill=tuple(attributes["paint"]), width=round(thick), joint="curve"
        )
        for n, (x, y) in enumerate(axes.canvas.points(points)):
            axes.canvas.draw.ellipse((x - dot, y - dot, x + dot, y + dot), fill=tuple(attributes["paint"]))
            axes.label(n, str(n + 1))
        return axes.canvas.finish()

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """The values."""
        return ("a line through " + ", ".join(map(str, attributes["values"])),)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """The value at each place, and whether the line ends higher than it began."""
        values = attributes["values"]
        return (
            Question("what", "what is this?", self.captions(attributes)[0]),
            *(Question("value", f"What is the value at {n}?", str(value)) for n, value in enumerate(values, start=1)),
            Question("trend", "Does the line end higher or lower?", "higher" if values[-1] > values[0] else "lower"),
        )
