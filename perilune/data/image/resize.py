"""How large an image becomes, in pixels, patches and tokens, from its size alone (architecture §8.7).

    s  = min(1, sqrt(L / (max(1, W//p) · max(1, H//p))), side·p/W, side·p/H)
    W' = min(max(1, int(W·s)), side·p);  H' alike                    shrinks, never enlarges; fractions are cut off
    padded on the right and at the bottom to multiples of merge·p;  one token for merge x merge patches

The rule counts whole patches of the upload and pads afterwards, so a grid may hold a few patches more than L.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from perilune.errors import ConfigError, RequestError

PILLOW_LIMIT = 178_956_970


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessorConfig:
    """Sizes and limits of image input; the defaults are those published with K3 (architecture §1.4).

    Attributes:
        patch_size: side p of a patch in pixels; the model's `vision.patch_size`.
        merge: side of the square of patches that becomes one token; the model's `vision.merge`.
        in_patch_limit: L for an image.
        patch_limit_on_one_side: most patches along one side.
        in_patch_limit_each_frame: L for a frame of a video.
        sample_fps: most frames a second that are taken from a video.
        frames_per_chunk: frames that the tower sees together; the model's `vision.max_frames`.
        image_mean, image_std: of the channels red, green, blue, for pixel values in 0..1.
        max_pixels: largest image that is decoded at all; a small file can claim any size. Ours; pillow's warning limit.
        max_frames: most frames taken from one video, after sampling. Ours.
        max_video_pixels: most pixels decoded from one animated file, all its frames together. Ours.
    """

    patch_size: int = 14
    merge: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    in_patch_limit_each_frame: int = 16384
    sample_fps: float = 8.0
    frames_per_chunk: int = 4
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    max_pixels: int = 89_478_485
    max_frames: int = 2048
    max_video_pixels: int = 2_000_000_000

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge", "in_patch_limit", "patch_limit_on_one_side", "in_patch_limit_each_frame",
                     "frames_per_chunk", "max_pixels", "max_frames", "max_video_pixels"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"image.{name}={getattr(self, name)} must be at least 1")
        if self.patch_limit_on_one_side % self.merge:
            raise ConfigError(
                f"image.patch_limit_on_one_side={self.patch_limit_on_one_side} must be a multiple of image.merge={self.merge}: "
                "padding would pass the limit otherwise"
            )
        if not (self.sample_fps > 0 and math.isfinite(self.sample_fps)):
            raise ConfigError(f"image.sample_fps={self.sample_fps} must be a finite number above 0")
        if len(self.image_mean) != 3 or len(self.image_std) != 3 or not all(std > 0 for std in self.image_std):
            raise ConfigError(
                f"image.image_mean={self.image_mean} and image.image_std={self.image_std} need three numbers each, "
                "those of image_std above 0"
            )
        if self.max_pixels > PILLOW_LIMIT:
            raise ConfigError(
                f"image.max_pixels={self.max_pixels} is above {PILLOW_LIMIT}, where pillow itself refuses"
            )


class ResizePlan(NamedTuple):
    """Sizes of one processed image or frame.

    Attributes:
        new_w, new_h: pixels after resizing.
        pad_w, pad_h: pixels after padding, not the width of the border.
        grid: (1, rows, columns) of patches.
        tokens: rows of the text model that it takes.
    """

    new_w: int
    new_h: int
    pad_w: int
    pad_h: int
    grid: tuple[int, int, int]
    tokens: int


def resize_plan(width: int, height: int, cfg: ImageProcessorConfig, *, patch_limit: int | None = None) -> ResizePlan:
    """Plan for an image of `width` x `height` pixels.

    Args:
        width, height: of the upload.
        cfg: limits.
        patch_limit: L instead of `cfg.in_patch_limit`, for a frame of a video.

    Raises:
        RequestError: a side is below 1.
    """
    if width < 1 or height < 1:
        raise RequestError(f"the image is {width} x {height} pixels; both sides must be at least 1")
    p, longest = cfg.patch_size, cfg.patch_limit_on_one_side * cfg.patch_size
    patches = max(1, width // p) * max(1, height // p)
    limit = cfg.in_patch_limit if patch_limit is None else patch_limit
    scale = min(1.0, math.sqrt(limit / patches), longest / width, longest / height)
    new_w, new_h = (min(max(1, int(size * scale)), longest) for size in (width, height))
    unit = p * cfg.merge
    columns, rows = -(-new_w // unit), -(-new_h // unit)
    grid = (1, rows * cfg.merge, columns * cfg.merge)
    return ResizePlan(new_w, new_h, columns * unit, rows * unit, grid, rows * columns)
