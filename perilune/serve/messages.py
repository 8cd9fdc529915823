"""Messages as this process writes them itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.errors import RequestError


def user_message(text: str, images: Sequence[Path] = ()) -> dict[str, Any]:
    """A user's message: the images in order, then the text.

    Raises:
        RequestError: a file cannot be read.
    """
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "image": _content(path)} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read the image {path}: {error.strerror}; give the path of a picture file") from None
