"""Rounding, encoding and decoding of whole tensors in MX blocks: the loops under `codec` and `fake_quant`.

A tensor `[..., I]` is seen as rows of I columns, each cut into blocks of 32. Implementations: "native" (C, on the CPU)
and "triton" (CUDA) read every element once and write every result once, in float32 and bfloat16; "torch" does the same
arithmetic in a dozen passes over slices that stay in the cache, in float64 too and on any device; "reference" searches the
grid for the nearest value. All of them agree bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice
from perilune.ops.mx import reference
from perilune.ops.mx.element import Element, code_values, grid_codes, round_to_grid
from perilune.ops.mx.scale import GROUP, carry, inverse_scale_values, scale_bytes, scale_values
from perilune.ops.native.rows import as_rows, choose, entry, fresh, threads_for
from perilune.ops.triton import available

SLICE_ELEMENTS = {
    "cpu": 1 << 16,
    "cuda": 1 << 26,
}  # of one pass of the torch path: its temporaries are seven times that


def select(x_NI: Tensor) -> Choice:
    """Say which implementation works on blocks of `x_NI` (for decoding: of the result), and why."""
    return available.choose(x_NI) or choose("mx", x_NI)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ConfigError unless blocks can be made of (or decoded to) this dtype."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ConfigError(
            f"MX blocks are made of float32, bfloat16 or float64, not {dtype}: the scales would overflow it; use .float()"
        )


def round_blocks(x_NI: Tensor, element: Element, rule: str) -> Tensor:
    """Every value as it comes back from the block format, in x's dtype and shape `[..., I]`; I may be any number."""
    check_dtype(x_NI.dtype)
    limit = carry(element, rule, 23)
    if x_NI.numel() == 0:
        return x_NI.clone()
    implementation = select(x_NI).implementation
    if implementation == "native":
        source, stride = as_rows(x_NI)
        width, out = x_NI.shape[-1], fresh(x_NI)
        rows = x_NI.numel() // width
        entry("mx", "mx_round", x_NI.dtype, "plpllili")(
            source.data_ptr(), stride, out.data_ptr(), rows, width, element.bits, limit, threads_for(x_NI.numel())
        )
        return out
    if implementation == "triton":
        from perilune.ops.mx import triton_blocks

        source, stride = as_rows(x_NI)
        out = fresh(x_NI)
        triton_blocks.round_rows(source, stride, out, x_NI.shape[-1], element, rule)
        return out
    if implementation == "reference":
        return reference.round_blocks(x_NI, element, rule)
    flat, out = x_NI.reshape(-1, x_NI.shape[-1]), fresh(x_NI)
    target = out.view(flat.shape)
    for part in _slices(flat):
        target[part] = _round(flat[part], element, rule)
    return out


def encode_blocks(x_NI: Tensor, element: Element, rule: str) -> tuple[Tensor, Tensor]:
    """Codes (uint8; of 4-bit elements two a byte, `[..., I/2]`, else `[..., I]`) and scales `[..., I/32]`; I % 32 == 0."""
    check_dtype(x_NI.dtype)
    limit = carry(element, rule, 23)
    width = x_NI.shape[-1]
    rows = x_NI.numel() // width if width else 0
    code_width = width * element.bits // 8
    codes = torch.empty(*x_NI.shape[:-1], code_width, dtype=torch.uint8, device=x_NI.device)
    scale = torch.empty(*x_NI.shape[:-1], width // GROUP, dtype=torch.uint8, device=x_NI.device)
    if x_NI.numel() == 0:
        return codes, scale
    implementation = select(x_NI).implementation
    if implementation == "native":
        source, stride = as_rows(x_NI)
        entry("mx", "mx_encode", x_NI.dtype, "plppllili")(
            source.data_ptr(), stride, codes.data_ptr(), scale.data_ptr(), rows, width, element.bits, limit,
            threads_for(x_NI.numel()),
        )  # fmt: skip
        return codes, scale
    if implementation == "triton":
        from perilune.ops.mx import triton_blocks

        source, stride = as_rows(x_NI)
        triton_blocks.encode_rows(source, stride, codes, scale, width, element, rule)
        return codes, scale
    encode = reference.encode_blocks if implementation == "reference" else _encode
    flat, code_rows, scale_rows = x_NI.reshape(rows, width), codes.view(rows, -1), scale.view(rows, -1)
    for part in _slices(flat):
        unpacked, scale_rows[part] = encode(flat[part], element, rule)
        code_rows[part] = pack_nibbles(unpacked) if element.bits == 4 else unpacked
    return codes, scale


def decode_blocks(codes: Tensor, scale: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode_blocks`: `[..., I]` in `dtype`."""
    check_dtype(dtype)
    width = scale.shape[-1] * GROUP
    out = torch.empty(*scale.shape[:-1], width, dtype=dtype, device=scale.device)
    if out.numel() == 0:
        return out
    rows = out.numel() // width
    implementation = select(out).implementation
    if implementation == "native":
        code_source, code_stride = as_rows(codes)
        scale_source, scale_stride = as_rows(scale)
        entry("mx", "mx_decode", dtype, "plplpllii")(
            code_source.data_ptr(), code_stride, scale_source.data_ptr(), scale_stride, out.data_ptr(), rows, width,
            element.bits, threads_for(out.numel()),
        )  # fmt: skip
        return out
    if implementation == "triton":
        from perilune.ops.mx import triton_blocks

        triton_blocks.decode_rows(codes.contiguous(), scale.contiguous(), out, element)
        return out
    target, code_rows, scale_rows = out.view(rows, width), codes.reshape(rows, -1), scale.reshape(rows, -1)
    exact = torch.promote_types(dtype, torch.float32)
    values = reference.code_values if implementation == "reference" else code_values
    for part in _slices(target):
        unpacked = unpack_nibbles(code_rows[part]) if element.bits == 4 else code_rows[part]
        blocks = values(unpacked, element, exact).unflatten(-1, (-1, GROUP))
        target[part] = (blocks * scale_values(scale_rows[part], exact)[..., None]).flatten(-2).to(dtype)
    return out


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, `[..., I]` -> `[..., I/2]`: the even column in the low nibble."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`, `[..., I/2]` -> `[..., I]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _slices(rows_NI: Tensor):
    """Slices of whole rows, each of about SLICE_ELEMENTS."""
    count = max(1, SLICE_ELEMENTS.get(rows_NI.device.type, 1 << 26) // max(1, rows_NI.shape[1]))
    return (slice(begin, begin + count) for begin in range(0, rows_NI.shape[0], count))


def _blocks(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes `[N, G, 32]` of zero-padded rows in float32 (float64), and each block's largest `[N, G]`."""
    exact = x_NI.to(torch.promote_types(x_NI.dtype, torch.float32))
    magnitude = F.pad(exact.abs(), (0, -x_NI.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    return magnitude, magnitude.amax(-1)


def _round(x_NI: Tensor, element: Element, rule: str) -> Tensor:
    magnitude, largest = _blocks(x_NI)
    scale = scale_bytes(largest, element, rule)
    rounded = round_to_grid(magnitude * inverse_scale_values(scale, magnitude.dtype)[..., None], element)
    values = rounded.mul_(scale_values(scale, magnitude.dtype)[..., None]).flatten(-2)[:, : x_NI.shape[1]]
    return torch.copysign(values.to(x_NI.dtype), x_NI)


def _encode(x_NI: Tensor, element: Element, rule: str) -> tuple[Tensor, Tensor]:
    magnitude, largest = _blocks(x_NI)
    scale = scale_bytes(largest, element, rule)
    rounded = round_to_grid(magnitude * inverse_scale_values(scale, magnitude.dtype)[..., None], element)
    invalid = rounded.isnan()
    codes = grid_codes(rounded.masked_fill_(invalid, 0.0), element).flatten(-2)
    signs = x_NI.signbit() & ~invalid.flatten(-2)
    return (codes | signs.to(codes.dtype) << (element.bits - 1)).to(torch.uint8), scale
