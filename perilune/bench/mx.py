"""Bench cases of the MX formats: encoding, decoding and fake quantisation.

All are bound by memory: the row's bound is a copy of as many bytes as go in and out. The peer is torchao, run eagerly like
ours; where it is not installed the rows stand alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from perilune.bench.harness import Case
from perilune.ops.mx import dequantize_mxfp4, dequantize_mxfp8, fake_quantize, quantize_mxfp4, quantize_mxfp8

SHAPES = {"cpu": ((2048, 2048),), "cuda": ((8192, 8192),)}  # rows, columns
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CODE_BYTES = {"mxfp4": 0.5, "mxfp8": 1.0}  # of an element
QUANTIZE = {"mxfp4": quantize_mxfp4, "mxfp8": quantize_mxfp8}
DEQUANTIZE = {"mxfp4": dequantize_mxfp4, "mxfp8": dequantize_mxfp8}

Pair = tuple[Callable[[], Any], Callable[[], Any] | None]


def _torchao(block_format: str) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[..., Tensor]] | None:
    """torchao's encoder, x -> (scales, codes), and decoder, (scales, codes, dtype) -> x; None without torchao."""
    if find_spec("torchao") is None:
        return None
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    element = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}[block_format]
    return (
        lambda x: to_mx(x, element, 32),
        lambda scale, codes, dtype: to_dtype(codes, scale, element, 32, dtype),
    )


def quantize_pair(x: Tensor, block_format: str) -> Pair:
    """Ours and the peer's encoding of `x`, both to (codes, scales)."""
    peer = _torchao(block_format)
    quantize = QUANTIZE[block_format]
    return lambda: quantize(x), None if peer is None else lambda: peer[0](x)[::-1]


def dequantize_pair(x: Tensor, block_format: str) -> Pair:
    """Ours and the peer's decoding of the encoded `x`."""
    peer = _torchao(block_format)
    decode, (codes, scale) = DEQUANTIZE[block_format], QUANTIZE[block_format](x)
    e8m0 = scale.view(torch.float8_e8m0fnu)
    return lambda: decode(codes, scale, x.dtype), None if peer is None else lambda: peer[1](e8m0, codes, x.dtype)


def fake_quant_pair(x: Tensor, block_format: str) -> Pair:
    """Ours, and the peer's encoding followed by its decoding."""
    peer = _torchao(block_format)
    return lambda: fake_quantize(x, block_format), None if peer is None else lambda: peer[1](*peer[0](x), x.dtype)


PAIRS = {"mx_quantize": quantize_pair, "mx_dequantize": dequantize_pair, "mx_fake_quant": fake_quant_pair}


def cases(device: str) -> Iterator[Case]:
    """Every operation, format and dtype at the device's sizes."""
    for name, pair in PAIRS.items():
        for block_format, code_bytes in CODE_BYTES.items():
            for dtype_name, dtype in DTYPES.items():
                for rows, columns in SHAPES[device]:
                    elements = rows * columns
                    encoded = elements * code_bytes + elements / 32
                    dense = elements * dtype.itemsize

                    def make(
                        pair: Callable[[Tensor, str], Pair] = pair,
                        block_format: str = block_format,
                        dtype: torch.dtype = dtype,
                        shape: tuple[int, int] = (rows, columns),
                    ) -> Pair:
                        x = torch.randn(*shape, generator=torch.Generator(device).manual_seed(0), device=device)
                        return pair(x.to(dtype), block_format)

                    yield Case(
                        name=f"{name}_{block_format}_{dtype_name}",
                        shape=f"N={rows} I={columns} {dtype_name}",
                        make=make,
                        peer="torchao eager" if find_spec("torchao") else "",
                        bytes=2 * dense if name == "mx_fake_quant" else dense + encoded,
                    )


OPS = {"mx": cases}
