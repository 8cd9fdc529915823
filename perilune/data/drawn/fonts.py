"""Fonts to write with: the one inside Pillow, and common ones of the system if they are there."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

BUILT_IN = "Pillow"
"""Name under which the font inside Pillow is known here."""

_TEXT = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "LiberationSans-Regular.ttf",
         "LiberationSerif-Regular.ttf", "Arial.ttf", "Georgia.ttf")  # fmt: skip
_EMOJI = ("NotoColorEmoji.ttf", "Apple Color Emoji.ttc")


def folders() -> list[Path]:
    """Where fonts lie on this system; $PERILUNE_FONTS names one more folder, which is searched first."""
    own = [Path(os.environ["PERILUNE_FONTS"])] if os.environ.get("PERILUNE_FONTS") else []
    if sys.platform == "darwin":
        return [*own, Path.home() / "Library/Fonts", Path("/Library/Fonts"), Path("/System/Library/Fonts")]
    return [*own, Path.home() / ".fonts", Path.home() / ".local/share/fonts", Path("/usr/share/fonts"),
            Path("/usr/local/share/fonts")]  # fmt: skip


@cache
def _installed(searched: tuple[Path, ...]) -> dict[str, Path]:
    wanted, found = {*_TEXT, *_EMOJI}, {}
    for folder in searched:
        for path in sorted(folder.rglob("*.tt[fc]")) if folder.is_dir() else ():
            if path.name in wanted:
                found.setdefault(path.name, path)
    return found


def text_fonts() -> tuple[str, ...]:
    """Names for `load`: Pillow's own, then those of the system in a fixed order."""
    installed = _installed(tuple(folders()))
    return (BUILT_IN, *(name for name in _TEXT if name in installed))


def emoji_font() -> Path | None:
    """A font with coloured emoji, if one is installed."""
    installed = _installed(tuple(folders()))
    return next((installed[name] for name in _EMOJI if name in installed), None)


@cache
def load(name: str, size: int) -> FreeTypeFont | ImageFont:
    """The font `name` of `text_fonts` at `size` pixels."""
    from PIL import ImageFont

    if name == BUILT_IN:
        return ImageFont.load_default(size)
    return ImageFont.truetype(str(_installed(tuple(folders()))[name]), size)
