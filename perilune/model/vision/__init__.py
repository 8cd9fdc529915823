"""Vision tower MoonViT-V2 and its projector into the text model."""

from perilune.model.vision.grids import item_tokens
from perilune.model.vision.images import ImageBatch, ImageRows
from perilune.model.vision.projector import Projector
from perilune.model.vision.tower import VisionTower

__all__ = ["ImageBatch", "ImageRows", "Projector", "VisionTower", "item_tokens"]
