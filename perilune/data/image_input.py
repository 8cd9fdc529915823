"""How the pictures of a run are prepared: in training, in evaluation, and when a user sends one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from perilune.config import TrainConfig
from perilune.data.image import ImageProcessor, ImageProcessorConfig
from perilune.data.image.published import FILE, read_document
from perilune.errors import ConfigError, RequestError


def image_processor(config: TrainConfig, folder: Path | None = None) -> ImageProcessor:
    """The processor that fits a run's vision tower.

    A run that was trained on pictures takes others at the size that it knows: the longest side is scaled down to
    `data.vision.image_size`. One without (a published checkpoint) has the limits of its preprocessor_config.json, or, where
    there is none, those published with K3.

    Args:
        config: of the run.
        folder: of the run, or of the published checkpoint.

    Raises:
        RequestError: the model has no vision tower.
        ConfigError: preprocessor_config.json is damaged, or of another tower.
    """
    vision = config.model.vision
    if vision is None:
        raise RequestError("this model has no vision tower and takes no images; use a run of `perilune demo --vision`")
    tower = ImageProcessorConfig(patch_size=vision.patch_size, merge=vision.merge, frames_per_chunk=vision.max_frames)
    if config.data.vision.share > 0.0:
        side = config.data.vision.image_size // vision.patch_size
        return ImageProcessor(
            replace(tower, patch_limit_on_one_side=side, in_patch_limit=side**2, in_patch_limit_each_frame=side**2)
        )
    path = None if folder is None else folder / FILE
    if path is None or not path.exists():
        return ImageProcessor(tower)
    told = read_document(path)
    for name in ("patch_size", "merge", "frames_per_chunk"):
        if getattr(told, name) != getattr(tower, name):
            raise ConfigError(
                f"{path} was written for another tower: {name} is {getattr(told, name)} there and {getattr(tower, name)} in the model"
            )
    return ImageProcessor(told)
