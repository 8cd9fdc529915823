"""Microscaling block formats: MXFP4 weights, MXFP8 activations, fake quantisation, experts on packed weights."""

from perilune.ops.mx.codec import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from perilune.ops.mx.experts import ACTIVATIONS, PackedWeight, packed_experts, rounded_input_experts
from perilune.ops.mx.fake_quant import fake_quantize
from perilune.ops.mx.pack import DeviceWeight, pack
from perilune.ops.mx.scale import RULES

__all__ = [
    "ACTIVATIONS",
    "RULES",
    "DeviceWeight",
    "PackedWeight",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "fake_quantize",
    "pack",
    "packed_experts",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "rounded_input_experts",
]
