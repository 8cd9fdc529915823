"""The K3 model, text and vision: modules that hold parameters and call `perilune.ops`; no rank, process group or kernel choice."""

from perilune.model.init import init_weights
from perilune.model.state import ModelState
from perilune.model.transformer import LossOutput, ModelOutput, Transformer
from perilune.model.vision import ImageBatch, ImageRows

__all__ = ["ImageBatch", "ImageRows", "LossOutput", "ModelOutput", "ModelState", "Transformer", "init_weights"]
