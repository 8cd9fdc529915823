"""Calls into the C kernels of attention (`ops/native/mla.c`): availability, strides and pointers, no mathematics."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.ops.native.blas import sgemm_address, why_no_blas, why_not_plain
from perilune.ops.native.build import load, unavailable_reason
from perilune.ops.segments import Segments

_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
_SIGNATURES = {
    "attention_forward": (*[_P] * 7, *[_L] * 5, _F, _P, _P, _I),
    "attention_backward": (*[_P] * 7, *[_L] * 5, _F, *[_P] * 5, _I),
    "latent_attention": (*[_P] * 7, *[_L] * 8, _F, _I, _I, _I, _P, _I),
    "latent_attention_pages": (*[_P] * 8, *[_L] * 8, _F, _I, _I, _I, _P, _I),
}
_HALF = {torch.float32: False, torch.bfloat16: True}
_library: ctypes.CDLL | None = None


def why_no_attention(q_BTHK: Tensor) -> str | None:
    """Return why the C attention cannot take these queries, or None if it can."""
    if q_BTHK.dtype is not torch.float32:
        return f"the C kernels take float32, the input is {str(q_BTHK.dtype)[6:]}"
    return why_not_plain(q_BTHK) or unavailable_reason("mla") or why_no_blas()


def why_no_decode(q_nope_BTHn: Tensor, latent_BSL: Tensor, w_uk_HnL: Tensor) -> str | None:
    """Return why the C form of absorbed attention cannot take these operands, or None if it can."""
    for tensor in (q_nope_BTHn, latent_BSL, w_uk_HnL):
        if tensor.dtype not in _HALF:
            return f"the C kernels take float32 and bfloat16, the input is {str(tensor.dtype)[6:]}"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "the C form of absorbed attention has no backward, and a gradient is wanted"
    return why_not_plain(q_nope_BTHn, latent_BSL, w_uk_HnL) or unavailable_reason("mla")


def library() -> ctypes.CDLL:
    """Return the loaded kernels, with their C signatures declared."""
    global _library
    if _library is None:
        loaded = load("mla")
        assert loaded is not None, "the C kernels were chosen but are not available"
        for name, arguments in _SIGNATURES.items():
            getattr(loaded, name).restype, getattr(loaded, name).argtypes = c_int, arguments
        _library = loaded
    return _library


def _checked(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the attention's working space")


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, segments: Segments | None, past: int) -> Tensor:
    """Return `attend.attend` of fp32 operands, differentiable."""
    return _Attention.apply(q, k, v, scale, segments, past)


def _token_major(x_BTHK: Tensor) -> Tensor:
    """The tensor itself if its (batch, token) rows are a fixed step apart and each head's row is dense, else a copy."""
    regular = x_BTHK.stride(-1) == 1 and (
        x_BTHK.shape[0] == 1 or x_BTHK.stride(0) == x_BTHK.shape[1] * x_BTHK.stride(1)
    )
    # BLAS wants a leading dimension of at least the row's width; a broadcast (step 0) has none.
    return x_BTHK if regular and x_BTHK.stride(1) >= x_BTHK.shape[-1] else x_BTHK.contiguous()


def _documents(q: Tensor, k: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Return (begin [2, N] of queries and of keys, length [N]) int64, one entry a document."""
    if segments is None:
        rows = torch.arange(q.shape[0])
        return torch.stack((rows * q.shape[1], rows * k.shape[1])), torch.full((q.shape[0],), q.shape[1])
    begin_N = segments.cu_seqlens[:-1].long()
    return torch.stack((begin_N, begin_N)), segments.cu_seqlens.diff().long()


def _arguments(q: Tensor, k: Tensor, v: Tensor, scale: float, segments: Segments | None, past: int) -> tuple:
    """The arguments that forward and backward share, and the tensors whose memory they point to."""
    step = torch.tensor([x.stride(d) for d in (1, 2) for x in (q, k, v)], dtype=torch.int64)
    begin, length = _documents(q, k, segments)
    pointers = [x.data_ptr() for x in (q, k, v, step, begin, length)]
    sizes = (length.numel(), past, q.shape[2], q.shape[3], v.shape[3])
    return (sgemm_address(), *pointers, *sizes, scale), (step, begin, length)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, segments, past):
        q, k, v = _token_major(q), _token_major(k), _token_major(v)
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
        arguments, keep = _arguments(q, k, v, scale, segments, past)
        _checked(library().attention_forward(*arguments, out.data_ptr(), lse.data_ptr(), torch.get_num_threads()))
        del keep
        ctx.save_for_backward(q, k, v, lse)
        ctx.options = (scale, segments, past)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, lse = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        arguments, keep = _arguments(q, k, v, *ctx.options)
        outputs = [x.data_ptr() for x in (lse, dout, dq, dk, dv)]
        _checked(library().attention_backward(*arguments, *outputs, torch.get_num_threads()))
        del keep
        return dq, dk, dv, None, None, None


def attend_latent(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    past: int,
) -> Tensor:
    """Return `latent.attend_latent`, without gradients."""
    q_nope, q_rope = q_nope.contiguous(), q_rope.contiguous()
    if rope_key.dtype is not latent.dtype:
        rope_key = rope_key.to(latent.dtype)
    latent, rope_key = (x if x.stride(-1) == 1 else x.contiguous() for x in (latent, rope_key))
    batch, tokens, heads, nope = q_nope.shape
    width, value = latent.shape[2], w_uv.shape[1]
    w_uk, w_uv = (w if w.stride(2) == 1 and w.stride(1) == width else w.contiguous() for w in (w_uk, w_uv))
    assert q_rope.dtype is q_nope.dtype and w_uv.dtype is w_uk.dtype, (
        "query parts and up-projections must share a dtype"
    )
    step = (c_int64 * 6)(
        latent.stride(1), rope_key.stride(1), latent.stride(0), rope_key.stride(0), w_uk.stride(0), w_uv.stride(0)
    )  # fmt: skip
    out = q_nope.new_empty(batch, tokens, heads, value)
    _checked(library().latent_attention(
        q_nope.data_ptr(), q_rope.data_ptr(), latent.data_ptr(), rope_key.data_ptr(), w_uk.data_ptr(), w_uv.data_ptr(),
        step, batch, tokens, heads, past, nope, q_rope.shape[3], value, width, scale,
        _HALF[q_nope.dtype], _HALF[latent.dtype], _HALF[w_uk.dtype], out.data_ptr(), torch.get_num_threads(),
    ))  # fmt: skip
    return out


def attend_latent_pages(
    q_nope: Tensor,
    q_rope: Tensor,
    entry_PSC: Tensor,
    table: Tensor,
    length: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """Return `pages.attend_latent_pages`, without gradients; the pages' rows are dense."""
    q_nope, q_rope, table, length = q_nope.contiguous(), q_rope.contiguous(), table.contiguous(), length.contiguous()
    batch, heads, nope = q_nope.shape
    width, value = w_uk.shape[2], w_uv.shape[1]
    w_uk, w_uv = (w if w.stride(2) == 1 and w.stride(1) == width else w.contiguous() for w in (w_uk, w_uv))
    step = (c_int64 * 3)(entry_PSC.stride(0), w_uk.stride(0), w_uv.stride(0))
    out = q_nope.new_empty(batch, heads, value)
    _checked(library().latent_attention_pages(
        q_nope.data_ptr(), q_rope.data_ptr(), entry_PSC.data_ptr(), w_uk.data_ptr(), w_uv.data_ptr(),
        step, table.data_ptr(), length.data_ptr(), batch, table.shape[1], entry_PSC.shape[1], heads, nope,
        q_rope.shape[2], value, width, scale, _HALF[q_nope.dtype], _HALF[entry_PSC.dtype], _HALF[w_uk.dtype],
        out.data_ptr(), torch.get_num_threads(),
    ))  # fmt: skip
    return out
