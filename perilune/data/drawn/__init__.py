"""Pictures that the machine draws itself, with questions whose answers are known."""

from perilune.data.drawn.catalogue import KINDS, Catalogue, kinds
from perilune.data.drawn.drawing import Drawing, Kind, Question

__all__ = ["KINDS", "Catalogue", "Drawing", "Kind", "Question", "kinds"]
