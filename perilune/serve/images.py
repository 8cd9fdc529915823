"""Images of a conversation: from message parts to rows of the model, and to names by which a prompt is known again.

All images of a prompt have the same media pads, so a prompt's ids alone would not say what it shows: the prefix cache gets
each image's digest beside them. The rows that the vision tower gave travel with the prompt, so nothing that is still being
answered can lose them; those of recent images are kept for later turns.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.data.image import ImageProcessor, ProcessedImage
from perilune.errors import RequestError
from perilune.model import Transformer
from perilune.model.vision import ImageBatch, ImageRows
from perilune.serve.cache import ImageKey
from perilune.tokenizer.xtml import ImageSize
from perilune.tokenizer.xtml.render import Rendered

_KEPT = 64
"""Images whose rows are kept for later turns."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image in a prompt.

    Attributes:
        start: index of its first pad.
        rows_ND: what stands there instead of embeddings, one row a pad.
        digest: of its content.
    """

    start: int
    rows_ND: Tensor
    digest: bytes

    @property
    def key(self) -> ImageKey:
        """What the prefix cache knows it by."""
        return ImageKey(self.start, len(self.rows_ND), self.digest)


class ShownImages:
    """Makes images ready for a model; may be called from any thread.

    Args:
        model: with a vision tower.
        processor: of the same run.
    """

    def __init__(self, model: Transformer, processor: ImageProcessor) -> None:
        self._model = model
        self.processor = processor
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """The tower has other weights: what it saw with the old ones is not used any more."""
        with self._lock:
            self._rows = OrderedDict()

    def load(self, messages: Sequence[Mapping[str, Any]]) -> list[ProcessedImage]:
        """Decode the image parts `{"type": "image", "image": …}` of messages, in order.

        Raises:
            RequestError: a part is no image; the message begins with its place.
        """
        images = []
        for number, message in enumerate(messages):
            content = message.get("content")
            for index, part in enumerate(content if isinstance(content, list) else []):
                if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
                    continue
                where = f"messages[{number}].content[{index}]"
                if part["type"] == "image_url" or isinstance(part.get("image"), str):
                    raise RequestError(
                        f"{where} is an address; give the image itself: its bytes, a pathlib.Path, or a picture"
                    )
                try:
                    images.append(self.processor.process(part.get("image")))  # type: ignore[arg-type]
                except RequestError as error:
                    raise RequestError(f"{where}: {error}") from None
        return images

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Show the tower a small empty picture, which is not kept, so that no request waits for a compiler."""
        from PIL import Image

        picture = self.processor.process(Image.new("RGB", (64, 64)))
        self._model.image_rows(self._batch(picture))

    @torch.inference_mode()
    def placed(self, rendered: Rendered, images: Sequence[ProcessedImage]) -> list[PlacedImage]:
        """The images at their places in a prompt; runs the tower on those that are new."""
        return [
            PlacedImage(span.start, self._rows_of(image), digest(image))
            for span, image in zip(rendered.media, images, strict=True)
        ]

    def _rows_of(self, image: ProcessedImage) -> Tensor:
        name = digest(image)
        with self._lock:
            known = self._rows
            if name in known:
                known.move_to_end(name)
                return known[name]
        rows = self._model.image_rows(self._batch(image))
        with self._lock:
            known[name] = rows  # nobody looks there any more if they were forgotten meanwhile
            while len(known) > _KEPT:
                known.popitem(last=False)
        return rows

    def _batch(self, image: ProcessedImage) -> ImageBatch:
        return ImageBatch.collate([image], torch.arange(image.tokens)).to(self._model.device)


def rows_between(images: Sequence[PlacedImage], start: int, end: int) -> ImageRows | None:
    """Rows of images for the tokens from `start` to `end` of a prompt, at positions counted from `start`; None = no pad there."""
    rows, positions = [], []
    for image in images:
        first, last = max(start, image.start), min(end, image.start + len(image.rows_ND))
        if first < last:
            rows.append(image.rows_ND[first - image.start : last - image.start])
            positions.append(torch.arange(first - start, last - start, device=image.rows_ND.device))
    return ImageRows(torch.cat(rows), torch.cat(positions)) if rows else None


def sizes(images: Sequence[ProcessedImage]) -> list[ImageSize]:
    """What the renderer needs to know of images."""
    return [ImageSize(*image.original_size, image.tokens) for image in images]


def digest(image: ProcessedImage) -> bytes:
    """A name that the image's content decides."""
    hasher = hashlib.sha256(repr((image.grid, image.original_size)).encode())
    hasher.update(image.patches.contiguous().numpy().tobytes())
    return hasher.digest()
