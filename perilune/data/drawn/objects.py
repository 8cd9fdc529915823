"""Single coloured objects: eight outlines, and where and how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perilune.data.drawn.canvas import COLOURS, RGB, Canvas, shade

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "heart")
"""The outlines, in the order in which combinations with colours are numbered."""

_TURN_DEGREES = 12.0


def unseen_pair(shape: str, colour: str) -> bool:
    """Whether no training picture shows this shape in this colour: one colour a shape, one shape a colour."""
    return tuple(COLOURS).index(colour) == (3 * SHAPES.index(shape) + 1) % len(COLOURS)


def choose(rng: np.random.Generator, x: float, y: float, radius: float) -> dict[str, Any]:
    """A random shape in a random colour around (x, y): pixels, like `radius`."""
    colour = tuple(COLOURS)[int(rng.integers(len(COLOURS)))]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    turn = 0.0 if shape in ("circle", "ring") else round(float(rng.uniform(-_TURN_DEGREES, _TURN_DEGREES)), 1)
    return {"shape": shape, "colour": colour, "paint": shade(rng, colour), "x": round(x, 1), "y": round(y, 1),
            "radius": round(radius, 1), "turn": turn}  # fmt: skip


def name(thing: Mapping[str, Any]) -> str:
    """Colour and shape: "red circle"."""
    return f"{thing['colour']} {thing['shape']}"


def with_article(words: str) -> str:
    """ "a red circle", "an orange star"."""
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def box(thing: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of an object in pixels."""
    corners = outline(thing)
    low, high = corners.min(axis=0), corners.max(axis=0)
    return float(low[0]), float(low[1]), float(high[0]), float(high[1])


def outline(thing: Mapping[str, Any]) -> np.ndarray:
    """Corner points `[n, 2]` of an object, x and y in pixels; of a ring the outer circle."""
    return _turned(_UNIT[thing["shape"]], thing["turn"]) * thing["radius"] + (thing["x"], thing["y"])


def paint(canvas: Canvas, thing: Mapping[str, Any], background: RGB) -> None:
    """Draw an object; the inside of a ring shows the background."""
    canvas.draw.polygon(canvas.points(outline(thing)), fill=tuple(thing["paint"]))
    if thing["shape"] == "ring":
        inner = dict(thing, shape="circle", radius=0.58 * thing["radius"])
        canvas.draw.polygon(canvas.points(outline(inner)), fill=tuple(background))


def _turned(points: np.ndarray, degrees: float) -> np.ndarray:
    angle = np.radians(degrees)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return points @ rotation.T


def _circle() -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _star() -> np.ndarray:
    angle = np.pi * (np.arange(10) / 5 - 0.5)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * np.where(np.arange(10) % 2, 0.42, 1.0)[:, None]


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    t = t[np.abs(t - np.pi) > 0.35]  # the curve ends in a needle that is thinner than a pixel
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)) / 16 + 0.1
    return np.stack([np.sin(t) ** 3, y], axis=1)


_UNIT: dict[str, np.ndarray] = {
    "circle": _circle(),
    "square": np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * 0.84,
    "triangle": np.array([(0, -1), (0.98, 0.8), (-0.98, 0.8)]),
    "star": _star(),
    "cross": np.array([(-0.32, -1), (0.32, -1), (0.32, -0.32), (1, -0.32), (1, 0.32), (0.32, 0.32), (0.32, 1),
                       (-0.32, 1), (-0.32, 0.32), (-1, 0.32), (-1, -0.32), (-0.32, -0.32)]),
    "ring": _circle(),
    "diamond": np.array([(0, -1), (0.78, 0), (0, 1), (-0.78, 0)]),
    "heart": _heart(),
}  # fmt: skip
"""Outlines `[n, 2]` around (0, 0), within about 1 of it; y points down."""
