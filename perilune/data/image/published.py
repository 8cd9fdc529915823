"""The settings in their published form: `media_proc_cfg` of a checkpoint's preprocessor_config.json (architecture §1.4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perilune.data.image.pixels import GREY, SQUARE, WHITE
from perilune.data.image.resize import ImageProcessorConfig
from perilune.errors import ConfigError

FILE = "preprocessor_config.json"
SECTION = "media_proc_cfg"
NAMES = {
    "in_patch_limit": "in_patch_limit",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge",
    "patch_limit_on_one_side": "patch_limit_on_one_side",
    "in_patch_limit_each_frame": "in_patch_limit_each_frame",
    "sample_fps": "sample_fps",
    "temporal_merge_kernel_size": "frames_per_chunk",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
"""Published name to ours."""
FIXED = {
    "fixed_output_tokens": None,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": SQUARE,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": WHITE,
        "chessboard_gray_value": GREY,
    },
    "transparent_bg_fill_stage": "after_resize",
}
"""What `pixels.py` does in one way only."""


def to_document(cfg: ImageProcessorConfig) -> dict[str, Any]:
    """The content of preprocessor_config.json. Our own limits of what is decoded at all are not in it."""
    values = {name: getattr(cfg, ours) for name, ours in NAMES.items()}
    return {SECTION: {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()} | FIXED}


def read_document(path: Path) -> ImageProcessorConfig:
    """Read preprocessor_config.json. A setting that it leaves out is the published one.

    Raises:
        ConfigError: it is no such file, or asks for something that `ImageProcessor` does not do.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))[SECTION]
        given = dict(told)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no JSON object with a section {SECTION!r}: {error}") from None
    for name, only in FIXED.items():
        if given.pop(name, only) != only:
            raise ConfigError(f"{path}: {SECTION}.{name} is {told[name]!r}; only {only!r} is supported")
    if unknown := given.keys() - NAMES.keys():
        raise ConfigError(f"{path}: {SECTION} has unknown settings: {', '.join(sorted(unknown))}")
    values = {NAMES[name]: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, value in values.items():
        kind = type(getattr(ImageProcessorConfig(), name))
        numbers = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) != (kind is tuple) or not all(
            isinstance(n, int | float) and not isinstance(n, bool) and (kind is not int or n == int(n)) for n in numbers
        ):
            raise ConfigError(f"{path}: {SECTION} holds {value!r} for {name}, which is no {kind.__name__} of numbers")
    try:
        return ImageProcessorConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
