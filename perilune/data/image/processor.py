"""Images and videos to what the vision tower takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from perilune.data.image import video
from perilune.data.image.load import ImageInput, animation_frames, load_image
from perilune.data.image.pixels import patchify, resized_pixels
from perilune.data.image.resize import ImageProcessorConfig, resize_plan
from perilune.errors import RequestError
from perilune.tokenizer.xtml.media import timestamp


@dataclass(frozen=True)
class ProcessedImage:
    """One item of the vision tower.

    Attributes:
        patches: fp32 `[t·h·w, 3, p, p]`, normalised; frames outermost, then rows, then columns.
        grid: frames, rows and columns of patches (t, h, w); t = 1 for an image.
        original_size: width and height of the upload in pixels, upright; what the prompt states.
        tokens: rows of the text model, (h/m)(w/m) whatever t is.
    """

    patches: Tensor
    grid: tuple[int, int, int]
    original_size: tuple[int, int]
    tokens: int


@dataclass(frozen=True)
class VideoChunk(ProcessedImage):
    """Up to `frames_per_chunk` frames of a video as one item.

    Attributes:
        seconds: times of its frames.
    """

    seconds: tuple[float, ...]

    @property
    def timestamp(self) -> str:
        """Time of the first frame as `hh:mm:ss.fff`: what stands before the chunk in a prompt (our syntax)."""
        return timestamp(self.seconds[0])


class ImageProcessor:
    """Resizes, composites, pads, normalises and cuts; the settings are in `cfg`."""

    def __init__(self, cfg: ImageProcessorConfig | None = None) -> None:
        self.cfg = cfg or ImageProcessorConfig()

    def process(self, image: ImageInput) -> ProcessedImage:
        """Process one image.

        Args:
            image: a pillow image, bytes of a file, a `Path`, or uint8 `[H, W]`, `[H, W, 1 | 3 | 4]`. Of an animated file the
                first frame is taken, as still viewers show it; `process_video` takes all.

        Raises:
            RequestError: pillow is missing, or the image is damaged, empty, too large, or of an unusable type.
        """
        picture = load_image(image, self.cfg.max_pixels)
        plan = resize_plan(*picture.size, self.cfg)
        return ProcessedImage(patchify(resized_pixels(picture, plan), self.cfg), plan.grid, picture.size, plan.tokens)

    def process_video(
        self,
        frames: Sequence[ImageInput] | bytes | Path,
        *,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
    ) -> list[VideoChunk]:
        """Process a video: take at most `sample_fps` frames a second and group them.

        Args:
            frames: images in order, all of one size, or an animated file (GIF, WebP, PNG), whose own times are used.
            fps: rate of the frames; only for images in order.
            timestamps: seconds of each frame, instead of `fps`.

        Returns:
            Chunks of `frames_per_chunk` frames in order; the last may have fewer.

        Raises:
            RequestError: as `process`; or no frame, frames of different sizes, too many, or unusable times.
        """
        taken = video.sampled(self._timed(frames, fps, timestamps), self.cfg.sample_fps)
        chunks: list[VideoChunk] = []
        parts: list[ProcessedImage] = []
        seconds: list[float] = []
        for index, (time, frame) in enumerate(taken):
            if index == self.cfg.max_frames:
                raise RequestError(
                    f"the video has more than {self.cfg.max_frames} frames at {self.cfg.sample_fps:g} a second "
                    f"({timestamp(time)} is reached): cut it, lower sample_fps, or raise max_frames"
                )
            parts.append(self._frame(frame, chunks[0] if chunks else parts[0] if parts else None, time))
            seconds.append(time)
            if len(parts) == self.cfg.frames_per_chunk:
                chunks.append(_chunk(parts, seconds))
                parts, seconds = [], []
        if parts:
            chunks.append(_chunk(parts, seconds))
        if not chunks:
            raise RequestError("the video has no frames; give at least one")
        return chunks

    def _timed(
        self, frames: Sequence[ImageInput] | bytes | Path, fps: float | None, timestamps: Sequence[float] | None
    ) -> Iterator[tuple[float, ImageInput]]:
        if isinstance(frames, (bytes, Path)):
            if fps is not None or timestamps is not None:
                raise RequestError("an animated file has its own times: give neither fps nor timestamps with it")
            yield from animation_frames(frames, self.cfg.max_pixels, self.cfg.max_video_pixels)
            return
        yield from zip(video.frame_times(len(frames), fps=fps, timestamps=timestamps), frames, strict=True)

    def _frame(self, frame: ImageInput, like: ProcessedImage | None, time: float) -> ProcessedImage:
        picture = load_image(frame, self.cfg.max_pixels)
        if like is not None and picture.size != like.original_size:
            raise RequestError(
                f"the frame at {timestamp(time)} is {picture.size[0]} x {picture.size[1]} pixels, the first one "
                f"{like.original_size[0]} x {like.original_size[1]}; all frames of a video must have one size"
            )
        plan = resize_plan(*picture.size, self.cfg, patch_limit=self.cfg.in_patch_limit_each_frame)
        return ProcessedImage(patchify(resized_pixels(picture, plan), self.cfg), plan.grid, picture.size, plan.tokens)


def _chunk(parts: list[ProcessedImage], seconds: list[float]) -> VideoChunk:
    _, h, w = parts[0].grid
    patches = torch.cat([part.patches for part in parts])
    return VideoChunk(patches, (len(parts), h, w), parts[0].original_size, parts[0].tokens, tuple(seconds))
