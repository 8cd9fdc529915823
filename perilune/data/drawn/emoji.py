"""Pictures of single emoji with their Unicode names, from a coloured font of the system."""

from __future__ import annotations

import unicodedata
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.drawn.drawing import Attributes, Question

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

_BLOCKS = ((0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F680, 0x1F6FF), (0x1F900, 0x1F9FF))
_STRIKES = (109, 160, 136, 96)
"""Sizes in pixels at which the known coloured fonts hold their bitmaps."""


class Emoji:
    """One emoji on white paper; the caption is its name in Unicode.

    Args:
        path: the font.
    """

    name = "emoji"

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def characters(self) -> tuple[str, ...]:
        """The characters that have a name in Unicode and a coloured picture in the font."""
        codes = (chr(code) for first, last in _BLOCKS for code in range(first, last + 1))
        return tuple(c for c in codes if unicodedata.name(c, "") and _glyph(self._path, c) is not None)

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`."""
        character = self.characters[int(rng.integers(len(self.characters)))]
        side = float(rng.uniform(0.7, 1.0)) * min(width, height)
        x, y = (round(float(rng.uniform(0.0, whole - side)), 1) for whole in (width, height))
        return {"width": width, "height": height, "character": character, "side": round(side), "x": x, "y": y}

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """Nothing: a name that was never read cannot be guessed."""
        return ()

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`."""
        from PIL import Image

        glyph = _glyph(self._path, attributes["character"])
        assert glyph is not None, f"{attributes['character']!r} is not among the font's characters"
        side = attributes["side"]
        paper = Image.new("RGB", (attributes["width"], attributes["height"]), "white")
        small = glyph.resize((side, side), Image.Resampling.LANCZOS)
        paper.paste(small, (int(attributes["x"]), int(attributes["y"])), small)
        return paper

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """The name."""
        return (unicodedata.name(attributes["character"]).lower(),)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """What it is."""
        return (Question("what", "what is this?", self.captions(attributes)[0]),)


@cache
def _font(path: Path) -> FreeTypeFont:
    from PIL import ImageFont

    for size in _STRIKES:
        try:
            return ImageFont.truetype(str(path), size)
        except OSError:  # a bitmap font opens only at the sizes that it holds
            continue
    return ImageFont.truetype(str(path), _STRIKES[0])


@cache
def _glyph(path: Path, character: str) -> Image | None:
    """The character's picture, cut to a square RGBA; None if the font has none in colour."""
    from PIL import Image, ImageDraw

    font = _font(path)
    side = int(font.size * 1.6)
    sheet = Image.new("RGBA", (side, side))
    ImageDraw.Draw(sheet).text((side // 8, side // 8), character, font=font, embedded_color=True)
    bounds = sheet.getbbox()
    if bounds is None:
        return None
    colours = np.asarray(sheet.crop(bounds)).reshape(-1, 4)
    if not (
        np.ptp(colours[colours[:, 3] > 0, :3].astype(int), axis=1) > 24
    ).any():  # the sign for a missing character is grey
        return None
    left, top, right, bottom = bounds
    half = (max(right - left, bottom - top) + 1) // 2
    x, y = (left + right) // 2, (top + bottom) // 2
    return sheet.crop((x - half, y - half, x + half, y + half))
