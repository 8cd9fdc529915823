"""Images and videos of a conversation in a file: where they are, and how much of the prompt they take."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.errors import RequestError
from perilune.tokenizer.xtml import ImageSize, VideoChunk, VideoSize
from perilune.tokenizer.xtml.messages import read_messages


def media_sizes(messages: Sequence[Mapping[str, Any]], folder: Path) -> tuple[list[ImageSize], list[VideoSize]]:
    """Sizes of the image and video parts of a conversation, in message order.

    Args:
        messages: as `perilune.tokenizer.xtml.render` takes them; a part's URL is a `data:` URL or the path of a file.
        folder: what relative paths are relative to.

    Raises:
        RequestError: malformed messages, a URL of another kind, or a file that is no image; with the part's place.
    """
    read_messages(messages)
    images: list[ImageSize] = []
    videos: list[VideoSize] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else []):
            kind = part["type"]
            if kind == "text":
                continue
            where = f"messages[{number}].content[{index}].{kind}"
            value = part[kind]
            source = _source(value.get("url") if isinstance(value, Mapping) else value, folder, where)
            if kind.startswith("image"):
                images.append(_image(source, where))
            else:
                videos.append(_video(source, where))
    return images, videos


def _image(source: bytes | Path, where: str) -> ImageSize:
    from perilune.data.image import ImageProcessor

    try:
        item = ImageProcessor().process(source)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
    return ImageSize(*item.original_size, item.tokens)


def _video(source: bytes | Path, where: str) -> VideoSize:
    from perilune.data.image import ImageProcessor

    try:
        chunks = ImageProcessor().process_video(source)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
    return VideoSize(*chunks[0].original_size, [VideoChunk(chunk.seconds[0], chunk.tokens) for chunk in chunks])


def _source(url: Any, folder: Path, where: str) -> bytes | Path:
    if not isinstance(url, str):
        raise RequestError(f"{where} is of type {type(url).__name__}; give a data: URL or the path of a file")
    if url.startswith("data:"):
        kind, _, data = url.partition(",")
        try:
            return base64.b64decode(data if kind.endswith(";base64") else "!", validate=True)
        except binascii.Error:
            raise RequestError(f"{where} is not a base64 data: URL; give data:image/png;base64,…") from None
    if "://" in url and not url.startswith("file://"):
        raise RequestError(f"{where} is {url[:60]}, which is not fetched; give a data: URL or the path of a file")
    return folder / url.removeprefix("file://")
