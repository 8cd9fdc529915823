"""The K3 text model: modules that hold parameters and call `perilune.ops`; no rank, process group or kernel choice."""

from perilune.model.init import init_weights
from perilune.model.state import ModelState
from perilune.model.transformer import LossOutput, ModelOutput, Transformer

__all__ = ["LossOutput", "ModelOutput", "ModelState", "Transformer", "init_weights"]
