"""Pictures of written words, to be read out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.drawn.canvas import COLOURS, Canvas, paper, shade
from perilune.data.drawn.drawing import Attributes, Question
from perilune.data.drawn.fonts import load, text_fonts

if TYPE_CHECKING:
    from PIL.Image import Image

_WORDS = tuple(
    "air ant arm art bag bat bed bell bird boat book box bread bus cake car cat chair coat cow cup day dog door duck ear "
    "egg eye fan farm fire fish flag foot fork fox frog game gate goat gold hand hat hen hill home horse ice ink jam jar "
    "key kite lake lamp leaf leg lion map milk moon mouse nail neck nest net nose nut owl pan pen pie pig pin pond pot rain "
    "rat ring road rock roof rope rose salt sand sea ship shoe shop sky snow soap sock star sun tea tent tin toe top toy "
    "tree van vase wall wave well wind wolf wood yard zoo".split()
)


class Words:
    """A short word or a number in one of the fonts; some words are never in training."""

    name = "words"

    def attributes(self, rng: np.random.Generator, width: int, height: int) -> dict[str, Any]:
        """See `Kind`. Three of four are words, in lower or upper case, one is a number of two to four digits."""
        if rng.random() < 0.25:
            text = str(rng.integers(10, 10 ** int(rng.integers(2, 5))))
        else:
            text = _WORDS[int(rng.integers(len(_WORDS)))]
            text = text.upper() if rng.random() < 0.3 else text
        colour = tuple(COLOURS)[int(rng.integers(len(COLOURS)))]
        ink = shade(rng, colour)
        fonts = text_fonts()
        font = fonts[int(rng.integers(len(fonts)))]
        fill, x, y = (round(float(value), 3) for value in rng.uniform((0.75, 0.0, 0.0), (0.95, 1.0, 1.0)))
        return {"width": width, "height": height, "paper": paper(rng, [ink]), "ink": ink, "text": text, "font": font,
                "fill": fill, "x": x, "y": y}  # fmt: skip

    def combination(self, attributes: Attributes) -> tuple[Any, ...]:
        """The word, whatever its case."""
        return (attributes["text"].lower(),)

    def picture(self, attributes: Attributes) -> Image:
        """See `Kind`. The word takes the share `fill` of the width or of the height, whichever it meets first."""
        width, height = attributes["width"], attributes["height"]
        canvas = Canvas(width, height, attributes["paper"])
        room_x, room_y = canvas.scaled(width, height)
        probe = load(attributes["font"], 100).getbbox(attributes["text"])
        size = 100 * attributes["fill"] * min(room_x / (probe[2] - probe[0]), room_y / (probe[3] - probe[1]))
        font = load(attributes["font"], max(6, int(size)))
        left, top, right, bottom = font.getbbox(attributes["text"])
        x = attributes["x"] * max(0.0, room_x - (right - left)) - left
        y = attributes["y"] * max(0.0, room_y - (bottom - top)) - top
        canvas.draw.text((x, y), attributes["text"], font=font, fill=tuple(attributes["ink"]))
        return canvas.finish()

    def captions(self, attributes: Attributes) -> tuple[str, ...]:
        """The text in quotes."""
        return (f'the text "{attributes["text"]}"',)

    def questions(self, attributes: Attributes) -> tuple[Question, ...]:
        """What it says."""
        return (
            Question("what", "what is this?", self.captions(attributes)[0]),
            Question("read", "What does it say?", attributes["text"]),
            Question("read", "Read the text.", attributes["text"]),
        )
