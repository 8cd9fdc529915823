"""Parts of a message's content: texts, and images that come with the request."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from perilune.serve.request import FieldError


class ImageURL(msgspec.Struct):
    """Where an image is: only `data:` addresses are read. `detail` is accepted and changes nothing."""

    url: str
    detail: str | None = None


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    image_url: ImageURL | str | None = None
    refusal: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The part as the chat renderer takes it.

        Raises:
            FieldError: neither a text nor an image that came with the request.
        """
        if self.type in ("text", "input_text", "output_text") and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "refusal" and self.refusal is not None:
            return {"type": "text", "text": self.refusal}
        if self.type in ("image_url", "input_image") and self.image_url is not None:
            url = self.image_url if isinstance(self.image_url, str) else self.image_url.url
            return {"type": "image", "image": image_bytes(url, where)}
        raise FieldError(
            f'{where} has type {self.type!r}; this server reads {{"type": "text", "text": …}} and '
            f'{{"type": "image_url", "image_url": {{"url": "data:image/png;base64,…"}}}}',
            where,
        )


def plain_content(parts: list[Part], where: str) -> str | list[dict[str, Any]]:
    """Parts as the renderer takes them; texts alone become one text."""
    plain = [part.plain(f"{where}[{index}]") for index, part in enumerate(parts)]
    if all(part["type"] == "text" for part in plain):
        return "".join(part["text"] for part in plain)
    return plain


def image_bytes(url: str, where: str) -> bytes:
    """The file inside a `data:` address.

    Raises:
        FieldError: another address (this server fetches nothing for a client), or a broken one.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not comma:
        raise FieldError(
            f"{where} has the address {url[:60]!r}; this server fetches nothing: send the image itself as "
            "data:image/png;base64,…",
            where,
        )
    if not head.endswith(";base64"):
        raise FieldError(f"{where} is not in base64; write data:image/png;base64,…", where)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FieldError(f"{where} is broken base64: {error}", where) from None
