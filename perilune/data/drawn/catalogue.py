"""All kinds of pictures by name, and the endless sequence of pictures of a seed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perilune.data.drawn.canvas import pillow
from perilune.data.drawn.drawing import Drawing, Kind
from perilune.data.drawn.emoji import Emoji
from perilune.data.drawn.fonts import emoji_font, text_fonts
from perilune.data.drawn.grid import Grid
from perilune.data.drawn.grounding import Grounding
from perilune.data.drawn.parts import PARTS, part
from perilune.data.drawn.plots import Bars, Line
from perilune.data.drawn.shapes import OneShape, TwoShapes
from perilune.data.drawn.words import Words
from perilune.errors import ConfigError

log = logging.getLogger("perilune.data")

KINDS = ("shape", "shapes", "words", "bars", "line", "grid", "boxes", "points", "emoji")
"""Every kind, `emoji` only where a coloured font is installed."""

_RECIPE = 1
"""Version of the pictures: raised when the same attributes are drawn or described otherwise."""
_LARGEST = 3.0
_TRIES = 10_000


def kinds(names: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds called `names`; one that is named twice stands twice, and is then drawn twice as often.

    Without a coloured font `emoji` is left out, and the log says so.

    Raises:
        ConfigError: Pillow is not installed, a name is unknown, or nothing is left.
    """
    pillow()
    found: list[Kind] = []
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"there is no kind of picture {name!r}; allowed: {', '.join(KINDS)}")
        if name == "emoji":
            font = emoji_font()
            if font is None:
                log.warning(
                    "no font with coloured emoji (NotoColorEmoji.ttf) is installed: pictures of emoji are left out"
                )
                continue
            found.append(Emoji(font))
        else:
            found.append(_MAKERS[name]())
    if not found:
        raise ConfigError(f"no kind of picture is left of {list(names)}; name some of: {', '.join(KINDS)}")
    return tuple(found)


_MAKERS = {
    "shape": OneShape,
    "shapes": TwoShapes,
    "words": Words,
    "bars": Bars,
    "line": Line,
    "grid": Grid,
    "boxes": lambda: Grounding("boxes"),
    "points": lambda: Grounding("points"),
}


@dataclass(frozen=True)
class Catalogue:
    """A sequence of pictures: number `index` of a seed and part is always the same one.

    Attributes:
        kinds: taken in turn.
        side: shortest side of a picture in pixels; sizes run from this to three times as much, and every third picture
            is not square.
        seed: of the sequence.
    """

    kinds: tuple[Kind, ...]
    side: int
    seed: int

    @property
    def fingerprint(self) -> str:
        """Everything that decides the pictures: kinds, sizes, seed, fonts, and the library that draws."""
        import PIL

        names = [kind.name for kind in self.kinds]
        return f"drawn {_RECIPE} {names} side {self.side} seed {self.seed} {text_fonts()} Pillow {PIL.__version__}"

    def draw(self, index: int, part_: str = "train") -> Drawing:
        """Picture `index` of a part: the first one of its own random numbers that belongs there.

        Args:
            index: from 0.
            part_: train | held_out | unseen (ConfigError if the kind has no such part).
        """
        assert part_ in PARTS, f"{part_!r} is no part of {PARTS}"
        kind = self.kinds[index % len(self.kinds)]
        rng = np.random.default_rng([self.seed, PARTS.index(part_), index])
        for _ in range(_TRIES):
            attributes = kind.attributes(rng, *self._size(rng))
            if part(kind, attributes) == part_:
                break
        else:
            raise ConfigError(f"the kind {kind.name!r} has no {part_} pictures; ask for another part or kind")
        return Drawing(kind.name, index, part_, kind.picture(attributes), kind.captions(attributes),
                       kind.questions(attributes), attributes)  # fmt: skip

    def _size(self, rng: np.random.Generator) -> tuple[int, int]:
        """Width and height: the processor must scale most pictures down, as it does with those of a user."""
        short = round(self.side * float(_LARGEST ** rng.random()))
        if rng.random() < 2 / 3:
            return short, short
        long = round(short * float(rng.uniform(1.0, 4 / 3)))
        return (long, short) if rng.random() < 0.5 else (short, long)
