"""Images of a conversation: from message parts to rows of the model, and to ids by which a prompt is known again.

All images of a prompt have the same media pads, so a prompt's ids alone would not say what it shows. Here every pad is
given an id of its own below zero, made of the image's content and the pad's place in it: two prompts share a kept state
only if they show the same images. The generator puts the rows of the vision tower where such ids stand.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.data.image import ImageProcessor, ProcessedImage
from perilune.errors import RequestError
from perilune.model import Transformer
from perilune.model.vision import ImageBatch, ImageRows
from perilune.tokenizer.xtml import ImageSize
from perilune.tokenizer.xtml.render import Rendered

_KEPT = 64
"""Images whose rows are kept for later turns; the conversation's own may be more."""


class ShownImages:
    """The images that were shown to a model, by their content.

    Args:
        model: with a vision tower.
        processor: of the same run.
    """

    def __init__(self, model: Transformer, processor: ImageProcessor) -> None:
        self._model = model
        self._processor = processor
        self._rows: OrderedDict[int, Tensor] = OrderedDict()
        self._row_of: dict[int, tuple[int, int]] = {}

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
                    images.append(self._processor.process(part.get("image")))  # type: ignore[arg-type]
                except RequestError as error:
                    raise RequestError(f"{where}: {error}") from None
        return images

    @torch.inference_mode()
    def placed(self, rendered: Rendered, images: Sequence[ProcessedImage]) -> list[int]:
        """The prompt's ids with every media pad replaced by the id of what it shows; runs the tower on new images."""
        ids = list(rendered.ids)
        for span, image in zip(rendered.media, images, strict=True):
            name = _name(image)
            if name not in self._rows:
                batch = ImageBatch.collate([image], torch.arange(image.tokens)).to(self._model.device)
                self._rows[name] = self._model.image_rows(batch)
                self._row_of |= {_pad(name, place): (name, place) for place in range(image.tokens)}
            self._rows.move_to_end(name)
            ids[span.start : span.start + span.tokens] = [_pad(name, place) for place in range(image.tokens)]
        shown = {_name(image) for image in images}
        while len(self._rows) > max(_KEPT, len(shown)):
            oldest, rows = self._rows.popitem(last=False)
            for place in range(len(rows)):
                del self._row_of[_pad(oldest, place)]
        return ids

    def rows(self, ids: Sequence[int]) -> ImageRows:
        """The rows for the ids below zero among `ids`, and their positions."""
        found = [(position, *self._row_of[token]) for position, token in enumerate(ids) if token < 0]
        rows = torch.stack([self._rows[name][place] for _, name, place in found])
        return ImageRows(rows, torch.tensor([position for position, _, _ in found], device=rows.device))


def sizes(images: Sequence[ProcessedImage]) -> list[ImageSize]:
    """What the renderer needs to know of images."""
    return [ImageSize(*image.original_size, image.tokens) for image in images]


def _name(image: ProcessedImage) -> int:
    """A number that the image's content decides."""
    digest = hashlib.sha256(repr((image.grid, image.original_size)).encode())
    digest.update(image.patches.contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7])


def _pad(name: int, place: int) -> int:
    """The id below zero of a pad: no token, unique to the image's content and the place in it."""
    return -1 - (name << 20 | place)
