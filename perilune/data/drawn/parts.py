"""Which pictures are trained on, and which never.

The part of a picture is decided by its attributes, so no picture can be in two parts:

- `unseen`: it shows a combination that training never shows (a shape in a colour, a word, the values of a chart);
- `held_out`: every sixteenth of the others, by a hash of all attributes;
- `train`: the rest.
"""

from __future__ import annotations

import hashlib
import json

from perilune.data.drawn.drawing import Attributes, Kind
from perilune.data.drawn.objects import unseen_pair

PARTS = ("train", "held_out", "unseen")
_HELD_OUT = 1 / 16
_UNSEEN = 1 / 8


def part(kind: Kind, attributes: Attributes) -> str:
    """The part that a picture belongs to."""
    if _is_unseen(kind, attributes):
        return "unseen"
    return "held_out" if _share(kind.name, dict(attributes)) < _HELD_OUT else "train"


def _is_unseen(kind: Kind, attributes: Attributes) -> bool:
    """Pairs of shape and colour by their own rule, which leaves every shape and colour its share; others by a hash."""
    combination = kind.combination(attributes)
    if not combination:
        return False
    if kind.name == "shape":
        return unseen_pair(*combination)
    if kind.name in ("shapes", "boxes", "points"):
        return any(unseen_pair(*pair) for pair in combination)
    return _share(kind.name, list(combination)) < _UNSEEN


def _share(*values: object) -> float:
    """A number in [0, 1) that a hash of `values` decides; the same on every machine."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64
