"""How the pictures of a run are prepared: in training, in evaluation, and when a user sends one."""

from __future__ import annotations

from perilune.config import TrainConfig
from perilune.data.image import ImageProcessor, ImageProcessorConfig
from perilune.errors import RequestError


def image_processor(config: TrainConfig) -> ImageProcessor:
    """The processor that fits a run's vision tower.

    A run that was trained on pictures takes others at the size that it knows: the longest side is scaled down to
    `data.vision.image_size`. One without (a published checkpoint) has the published limits.

    Raises:
        RequestError: the model has no vision tower.
    """
    vision = config.model.vision
    if vision is None:
        raise RequestError("this model has no vision tower and takes no images; use a run of `perilune demo --vision`")
    sizes = {"patch_size": vision.patch_size, "merge": vision.merge, "frames_per_chunk": vision.max_frames}
    if config.data.vision.share == 0.0:
        return ImageProcessor(ImageProcessorConfig(**sizes))
    side = config.data.vision.image_size // vision.patch_size
    return ImageProcessor(
        ImageProcessorConfig(
            **sizes, patch_limit_on_one_side=side, in_patch_limit=side**2, in_patch_limit_each_frame=side**2
        )
    )
