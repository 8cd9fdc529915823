"""Pixels to patches: resize with alpha, lay on a chessboard, pad, normalise, cut (architecture §8.7).

    colour = floor((rgb · a + board · (255 − a)) / 255)      board: 8-pixel squares, 255 at the top left, then 180
    patch value = (colour / 255 − mean) / std                padding is black before this, so −1 with the published numbers

The chessboard is laid after the resize, so its squares have the size that the model sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perilune.data.image.resize import ImageProcessorConfig, ResizePlan

if TYPE_CHECKING:
    from PIL.Image import Image

SQUARE, WHITE, GREY = 8, 255, 180


def chessboard(width: int, height: int) -> np.ndarray:
    """The background of transparent images, uint16 `[height, width]`: 255 and 180 in squares of 8 pixels."""
    odd = np.arange(height)[:, None] // SQUARE + np.arange(width)[None] // SQUARE & 1
    return np.where(odd, np.uint16(GREY), np.uint16(WHITE))


def composite(rgba_HWC: np.ndarray) -> np.ndarray:
    """Lay uint8 `[H, W, 4]` on the chessboard; uint8 `[H, W, 3]`, fractions cut off exactly (integer arithmetic)."""
    if rgba_HWC[..., 3].min() == 255:
        return rgba_HWC[..., :3]
    alpha = rgba_HWC[..., 3].astype(np.uint16)
    ground = chessboard(rgba_HWC.shape[1], rgba_HWC.shape[0]) * (255 - alpha)
    out = np.empty((*alpha.shape, 3), dtype=np.uint8)
    for channel in range(3):
        blend = rgba_HWC[..., channel] * alpha + ground  # at most 255²
        out[..., channel] = (blend + 1 + (blend >> 8)) >> 8  # blend // 255 without a division, for blend < 2^16 - 1
    return out


def resized_pixels(image: Image, plan: ResizePlan) -> np.ndarray:
    """Bicubic resize, background, black padding: uint8 `[pad_h, pad_w, 3]` of an image in L, RGB or RGBA."""
    from PIL import Image as pillow

    if image.size != (plan.new_w, plan.new_h):
        image = image.resize((plan.new_w, plan.new_h), pillow.Resampling.BICUBIC)
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.shape[2] == 4:
        pixels = composite(pixels)
    canvas = np.zeros((plan.pad_h, plan.pad_w, 3), dtype=np.uint8)
    canvas[: plan.new_h, : plan.new_w] = pixels
    return canvas


def patchify(pixels_HWC: np.ndarray, cfg: ImageProcessorConfig) -> Tensor:
    """Normalise and cut uint8 `[H, W, 3]` into patches `[(H/p)(W/p), 3, p, p]` fp32, row by row."""
    rows, columns = pixels_HWC.shape[0] // cfg.patch_size, pixels_HWC.shape[1] // cfg.patch_size
    x = torch.from_numpy(pixels_HWC).view(rows, cfg.patch_size, columns, cfg.patch_size, 3)
    x = x.permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, cfg.patch_size, cfg.patch_size).to(torch.float32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cfg.image_mean, cfg.image_std))
    return x.div_(255).sub_(mean).div_(std)
