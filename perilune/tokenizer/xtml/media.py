"""What stands in a prompt for an image or a video.

An image is `<|media_begin|>image {W}x{H}<|media_content|>`, one `<|media_pad|>` for each embedding, `<|media_end|>`,
where W and H are the size that was uploaded, not the size after scaling (architecture §8.8). Only the pads receive
embeddings. Both are put in as segments: a placeholder string in the text could merge with what follows it, and a user
could write it.

The published model's syntax for video is not known. Ours is one such element for every chunk of up to four frames,
with the word `video`, and before it the time of the chunk's first frame as `hh:mm:ss.fff`: the shape of Kimi K2.5's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perilune.errors import RequestError
from perilune.tokenizer.xtml.markup import Image, Marker, Segment, Video

MEDIA_BEGIN = Marker("<|media_begin|>")
MEDIA_CONTENT = Marker("<|media_content|>")
MEDIA_PAD = Marker("<|media_pad|>")
MEDIA_END = Marker("<|media_end|>")


class ImageSize(NamedTuple):
    """Width and height in pixels as uploaded, and how many embeddings the vision tower makes of it."""

    width: int
    height: int
    tokens: int


class VideoChunk(NamedTuple):
    """Time of a chunk's first frame in seconds, and how many embeddings the vision tower makes of the chunk."""

    seconds: float
    tokens: int


class VideoSize(NamedTuple):
    """Width and height in pixels as uploaded, and the chunks in order."""

    width: int
    height: int
    chunks: Sequence[VideoChunk]


Images = Sequence[tuple[int, int, int]]
"""`ImageSize` of each image, by the index of its place."""

Videos = Sequence[tuple[int, int, Sequence[tuple[float, int]]]]
"""`VideoSize` of each video, by the index of its place."""


def expand(segments: Sequence[Segment], images: Images = (), videos: Videos = ()) -> list[Segment]:
    """Segments with every media place replaced by its markers, text and pads.

    Raises:
        RequestError: a place without a size, or a size without a place; a size that is not positive.
    """
    check_sizes(segments, images, videos)
    return [piece for segment in segments for piece in replaced(segment, images, videos)]


def check_sizes(segments: Sequence[Segment], images: Images, videos: Videos) -> None:
    """RequestError unless there are as many sizes as places."""
    for kind, word, sizes in ((Image, "image", images), (Video, "video", videos)):
        places = sum(isinstance(segment, kind) for segment in segments)
        if places != len(sizes):
            raise RequestError(f"the messages have {places} {word} parts, but {len(sizes)} {word} sizes are given")


def replaced(segment: Segment, images: Images, videos: Videos) -> list[Segment]:
    """What stands for one segment: itself, unless it is a media place."""
    if isinstance(segment, Image):
        return image_segments(ImageSize(*images[segment.index]), segment.index)
    if isinstance(segment, Video):
        width, height, chunks = videos[segment.index]
        return video_segments(VideoSize(width, height, [VideoChunk(*chunk) for chunk in chunks]), segment.index)
    return [segment]


def image_segments(size: ImageSize, index: int = 0) -> list[Segment]:
    """What replaces an image's place; `index` is for errors."""
    if min(size) < 1:
        raise RequestError(f"image {index} is {size}; width, height and tokens must be positive")
    return _element("image", size.width, size.height, size.tokens)


def video_segments(size: VideoSize, index: int = 0) -> list[Segment]:
    """What replaces a video's place; `index` is for errors."""
    if min(size.width, size.height) < 1 or not size.chunks:
        raise RequestError(f"video {index} is {size}; width and height must be positive, and it needs a chunk")
    out: list[Segment] = []
    for seconds, tokens in size.chunks:
        if tokens < 1 or not 0 <= seconds < float("inf"):
            raise RequestError(
                f"video {index} has a chunk of {tokens} tokens at {seconds} s; tokens must be positive, times not negative"
            )
        out += [timestamp(seconds), *_element("video", size.width, size.height, tokens)]
    return out


def timestamp(seconds: float) -> str:
    """`hh:mm:ss.fff`, rounded down to milliseconds; hours go on beyond 24."""
    milliseconds = int(seconds * 1000 + 1e-6)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}.{milliseconds % 1000:03d}"


def _element(word: str, width: int, height: int, tokens: int) -> list[Segment]:
    return [MEDIA_BEGIN, f"{word} {width}x{height}", MEDIA_CONTENT, *[MEDIA_PAD] * tokens, MEDIA_END]
