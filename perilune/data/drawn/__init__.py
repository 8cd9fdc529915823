"""Pictures that the machine draws itself, with questions whose answers are known."""

from perilune.data.drawn.catalogue import KINDS, Catalogue, kinds
from perilune.data.drawn.documents import DocumentWriter, ImageDocument
from perilune.data.drawn.drawing import Drawing, Kind, Question
from perilune.data.drawn.source import DrawnSource

__all__ = [
    "KINDS",
    "Catalogue",
    "DocumentWriter",
    "Drawing",
    "DrawnSource",
    "ImageDocument",
    "Kind",
    "Question",
    "kinds",
]
