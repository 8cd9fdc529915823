"""Quantisation of a model from outside: training with rounded experts, and rounding their weights for good."""

from perilune.config.train import QuantConfig
from perilune.quant.qat import QuantizedExperts, apply_qat, quantize_experts

__all__ = ["QuantConfig", "QuantizedExperts", "apply_qat", "quantize_experts"]
