"""A chequered sheet with one coloured cell, to say where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.drawn.canvas import COLOURS, Canvas, paper, shade
from perilune.data.drawn.drawing import Attributes, Question

if TYPE_CHECKING:
    from PIL.Image import Image


class Grid:
    """Two to five rows and columns; rows are counted from the top, columns from the left, both from 1."""

    name = "grid"

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`."""
        rows, columns = (int(n) for n in rng.integers(2, 6, 2))
        colour = tuple(COLOURS)[int(rng.integers(len(COLOURS) - 2))]  # black and white are those of lines and paper
        paint = shade(rng, colour)
        return {"width": width, "height": height, "rows": rows, "columns": columns, "row": int(rng.integers(1, rows + 1)),
                "column": int(rng.integers(1, columns + 1)), "colour": colour, "paint": paint,
                "paper": paper(rng, [paint, COLOURS["black"]])}  # fmt: skip

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """Size, place and colour."""
        return tuple(attributes[key] for key in ("rows", "columns", "row", "column", "colour"))

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        width, height = attributes["width"], attributes["height"]
        canvas = Canvas(width, height, attributes["paper"])
        margin = 0.05 * min(width, height)
        x = np.linspace(margin, width - margin, attributes["columns"] + 1)
        y = np.linspace(margin, height - margin, attributes["rows"] + 1)
        column, row = attributes["column"], attributes["row"]
        canvas.draw.rectangle(
            canvas.scaled(x[column - 1], y[row - 1], x[column], y[row]), fill=tuple(attributes["paint"])
        )
        line = max(1, round(canvas.scaled(min(width, height) / 60)[0]))
        for at in x:
            canvas.draw.line(canvas.scaled(at, y[0], at, y[-1]), fill=COLOURS["black"], width=line)
        for at in y:
            canvas.draw.line(canvas.scaled(x[0], at, x[-1], at), fill=COLOURS["black"], width=line)
        return canvas.finish()

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """Size of the sheet, and the cell."""
        a = attributes
        return (f"{a['rows']} rows and {a['columns']} columns, {a['colour']} at row {a['row']} column {a['column']}",)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """Where the cell is, its colour, how many rows and columns."""
        a = attributes
        return (
            Question("what", "what is this?", self.captions(a)[0]),
            Question("cell", "Which cell is coloured?", f"row {a['row']} column {a['column']}"),
            Question("colour", "What colour is the cell?", a["colour"]),
            Question("count", "How many rows and columns are there?", f"{a['rows']} rows and {a['columns']} columns"),
        )
