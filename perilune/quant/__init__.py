"""Quantisation of a model from outside: training with it, snapping weights to the grid, the published packed form."""

from perilune.config.train import QuantConfig
from perilune.quant.packed import packed_tensors, unpacked
from perilune.quant.qat import QuantizedExperts, apply_qat, quantize_experts

__all__ = ["QuantConfig", "QuantizedExperts", "apply_qat", "packed_tensors", "quantize_experts", "unpacked"]
