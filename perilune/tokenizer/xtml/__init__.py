"""The K3 chat format (XTML): messages to prompt ids, and output ids back to messages."""

from perilune.tokenizer.xtml.markup import (
    Image,
    Marker,
    Segment,
    Video,
    close_tag,
    encode_segments,
    escape,
    open_tag,
    unescape,
)

__all__ = [
    "Image",
    "Marker",
    "Segment",
    "Video",
    "close_tag",
    "encode_segments",
    "escape",
    "open_tag",
    "unescape",
]
