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
from perilune.tokenizer.xtml.media import ImageSize, VideoChunk, VideoSize, expand
from perilune.tokenizer.xtml.options import EFFORTS
from perilune.tokenizer.xtml.render import MediaSpan, Rendered, conversation_segments, render
from perilune.tokenizer.xtml.template import Wording, load_wording

__all__ = [
    "EFFORTS",
    "Image",
    "ImageSize",
    "Marker",
    "MediaSpan",
    "Rendered",
    "Segment",
    "Video",
    "VideoChunk",
    "VideoSize",
    "Wording",
    "close_tag",
    "conversation_segments",
    "encode_segments",
    "escape",
    "expand",
    "load_wording",
    "open_tag",
    "render",
    "unescape",
]
