"""Published checkpoints: names, files, experts, and a folder as a source of tensors (architecture §2)."""

from perilune.model.hf import experts
from perilune.model.hf.files import PlannedFile, fill, published_files
from perilune.model.hf.names import Link, Place, links, own_shapes, places, to_published
from perilune.model.hf.source import PublishedSource, Source, is_published

__all__ = [
    "Link", "Place", "experts", "PlannedFile", "PublishedSource", "Source", "fill", "is_published", "links", "own_shapes", "places",
    "published_files", "to_published",
]  # fmt: skip
