"""Paper and paint: colours with their names, backgrounds that let them be seen, smooth edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from perilune.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (214, 32, 38),
    "green": (34, 160, 60),
    "blue": (30, 80, 215),
    "yellow": (246, 216, 38),
    "purple": (136, 44, 172),
    "orange": (242, 130, 22),
    "black": (16, 16, 18),
    "white": (250, 250, 250),
}
"""The colours that have names, in the order in which combinations with shapes are numbered."""

_PAPERS: tuple[RGB, ...] = (
    (255, 255, 255), (240, 240, 240), (205, 208, 212), (150, 152, 156), (96, 99, 104), (44, 46, 52), (12, 12, 14),
    (250, 240, 222), (216, 232, 246), (222, 240, 220),
)  # fmt: skip
_JITTER = 14
_CONTRAST = 110.0
_OVERSAMPLING = 2


def pillow() -> None:
    """Check that Pillow is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "drawing pictures needs Pillow, which is not installed: pip install 'perilune[vision]'"
        ) from None


def shade(rng: np.random.Generator, name: str) -> RGB:
    """A shade of the colour `name`: every channel moved by up to 14 of 255."""
    moved = np.array(COLOURS[name]) + rng.integers(-_JITTER, _JITTER + 1, 3)
    return _rgb(np.clip(moved, 0, 255))


def paper(rng: np.random.Generator, paints: Sequence[RGB]) -> RGB:
    """A background on which every one of `paints` can be seen; white as often as all others together."""
    seen = [p for p in _PAPERS if all(_distance(p, paint) >= _CONTRAST for paint in paints)]
    if not seen:  # many colours at once: the paper that is farthest from the nearest of them
        return max(_PAPERS, key=lambda p: min(_distance(p, paint) for paint in paints))
    if seen[0] == _PAPERS[0] and rng.random() < 0.5:
        return _PAPERS[0]
    return seen[int(rng.integers(len(seen)))]


def _distance(a: RGB, b: RGB) -> float:
    """Euclidean distance of two colours, each channel in 0..255."""
    return float(np.linalg.norm(np.subtract(a, b)))


def _rgb(values: np.ndarray) -> RGB:
    red, green, blue = (int(v) for v in values)
    return red, green, blue


class Canvas:
    """A picture being drawn at twice its size; `finish` halves it, which smooths the edges.

    Coordinates given to `scaled` are pixels of the finished picture, with (0, 0) the outer corner of its first pixel.
    """

    def __init__(self, width: int, height: int, background: RGB) -> None:
        from PIL import Image, ImageDraw

        self._image = Image.new("RGB", (width * _OVERSAMPLING, height * _OVERSAMPLING), tuple(background))
        self.draw: ImageDraw = ImageDraw.Draw(self._image)

    def scaled(self, *values: float) -> list[float]:
        """Lengths or coordinates in the units of `draw`."""
        return [value * _OVERSAMPLING for value in values]

    def points(self, points: np.ndarray) -> list[tuple[float, float]]:
        """Corner points `[n, 2]` in the units of `draw`."""
        return [(float(x) * _OVERSAMPLING, float(y) * _OVERSAMPLING) for x, y in points]

    def finish(self) -> Image:
        """The picture."""
        return self._image.reduce(_OVERSAMPLING)
