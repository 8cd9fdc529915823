"""Sizes as people write them: 512M, 2G."""

from __future__ import annotations

import argparse

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    """Bytes. Raises argparse.ArgumentTypeError for what is no size."""
    bare = text.rstrip("bBiI")
    number, unit = bare.rstrip("kKmMgGtT"), bare[-1:].lower()
    try:
        return int(float(number) * _UNITS[unit if unit in _UNITS else ""])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512M or 2G") from None
