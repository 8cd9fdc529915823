"""One token of a KDA mixer between its projections: convolution, norms, gates and recurrence as one call.

    q, k, v = SiLU(conv(window + token));  q, k = q, k / |.|;  alpha = exp(gate(decay_logit))
    S = S alpha + u k^T,  u = sigmoid(beta_logit) (v - (S alpha) k)        the state [V, K] of each head, in place
    o = RMSNorm(scale * S q) * norm_weight * sigmoid(gate)

At batch 1 a token costs little arithmetic, so what counts is the number of calls: the native form is a single one. So are
the forms for CUDA devices, where with more rows the traffic of the states counts: a hand-written kernel for bfloat16 on
Hopper, and Triton for what that does not take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.kda.arguments import L2_EPS, MAX_KEY_DIM
from perilune.ops.kda.cuda import decode as cuda
from perilune.ops.kda.gate import compute_dtype, fused_kda_gate
from perilune.ops.native.build import load, unavailable_reason
from perilune.ops.triton.available import obstacle as triton_obstacle

TYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_TAPS = 16  # PL_MAX_TAPS in kda_decode.c

_INTEGERS = (
    "batch heads key_dim value_dim taps threads qkv_stride decay_stride beta_stride gate_stride type window_type bounded"
).split()
_FLOATS = "scale lower_bound norm_eps unused".split()
_POINTERS = "conv_weight A_log dt_bias norm_weight window state qkv decay beta gate out page".split()
_STRIDES = "state_page state_head window_page window_head".split()


class _Struct(ctypes.Structure):
    """`kda_decode_args` of kda_decode.c, field for field."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTEGERS]
        + [(name, ctypes.c_float) for name in _FLOATS]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
    )


_NATIVE = Choice("native", "one C call a token and layer")
_TRITON = Choice("triton", "one launch a token and layer")
_CUDA = Choice("cuda", "one launch a token and layer, the states of the next heads under way while one is computed")


def select(device: torch.device | str, dtype: torch.dtype) -> Choice:
    """Say which implementation `kda_decode_step` runs for activations of `dtype` on `device`, and why."""
    wanted = forced()
    if wanted in ("reference", "torch"):
        return Choice("torch", "demanded by PERILUNE_OPS or force()")
    device = torch.device(device)
    if device.type != "cpu" and wanted == "native":
        return Choice("torch", f"plain torch: the native kernel runs on the CPU, not on {device.type}")
    obstacle = None
    if wanted == "cuda" or device.type != "cpu" and wanted is None:
        obstacle = cuda.why_not(device, dtype)
        if obstacle is None:
            return _CUDA
    if device.type != "cpu" or wanted == "triton":
        reason = triton_obstacle(device, dtype)
        if reason is not None:
            return Choice("torch", f"plain torch: {reason}")
        return _TRITON if obstacle is None else Choice("triton", f"{_TRITON.reason}; {obstacle}")
    if dtype not in TYPES:
        obstacle = f"the native kernel takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    else:
        obstacle = unavailable_reason("kda_decode")
    if obstacle is None:
        return _NATIVE
    return Choice("torch", f"plain torch: {obstacle}")


def kda_decode_step(
    qkv_BX: Tensor,
    conv_weight_XW: Tensor,
    window_BXW1: Tensor,
    decay_logit_BHK: Tensor,
    A_log_H: Tensor | None,
    dt_bias: Tensor | None,
    beta_logit_BH: Tensor,
    gate_BHV: Tensor,
    norm_weight_V: Tensor,
    state_BHVK: Tensor,
    *,
    num_heads: int,
    key_dim: int,
    lower_bound: float | None,
    scale: float,
    norm_eps: float,
    index_B: Tensor | None = None,
) -> Tensor:
    """Advance every row by one token; no gradient.

    Args:
        qkv_BX: raw projections, X = 2 H K + H V channels in the order q | k | v.
        conv_weight_XW: taps of the causal depthwise convolution, the newest token's last.
        window_BXW1: the last W-1 raw projections, oldest first; shifted IN PLACE.
        decay_logit_BHK, beta_logit_BH, gate_BHV: raw logits of this token (trailing sizes may be flattened).
        A_log_H, dt_bias: parameters of the decay gate, see `fused_kda_gate`; each may be None.
        norm_weight_V: weight of the output RMSNorm.
        state_BHVK: float32 (float64 for float64 activations), contiguous; updated IN PLACE.
        lower_bound: of the bounded gate; None = softplus gate.
        index_B: int32 or int64; then window and state are pools `[slots, ...]`, and row b uses slot `index_B[b]`. No two
            rows may name one slot. A negative number marks a padding row: it gives zeros and touches no slot.

    Returns:
        `[B, H * V]` in the dtype of `qkv_BX`.

    Raises:
        ConfigError: a shape or the state's layout does not fit, or a slot is not in the pool (the Triton form cannot
            look without stopping the device: it gives NaN for such a row and touches no slot).
    """
    batch, channels = qkv_BX.shape
    value_dim = norm_weight_V.shape[0]
    if channels != num_heads * (2 * key_dim + value_dim) or conv_weight_XW.shape[0] != channels:
        raise ConfigError(
            f"qkv has {channels} channels and the convolution {conv_weight_XW.shape[0]}; "
            f"{num_heads} heads of K = {key_dim}, V = {value_dim} need {num_heads * (2 * key_dim + value_dim)}"
        )
    taps = conv_weight_XW.shape[1]
    slots = batch if index_B is None else state_BHVK.shape[0]
    if state_BHVK.shape != (slots, num_heads, value_dim, key_dim) or window_BXW1.shape != (slots, channels, taps - 1):
        raise ConfigError(
            f"state {tuple(state_BHVK.shape)} and window {tuple(window_BXW1.shape)} must be "
            f"{(slots, num_heads, value_dim, key_dim)} and {(slots, channels, taps - 1)}"
        )
    if index_B is not None and (index_B.shape != (batch,) or index_B.dtype not in (torch.int32, torch.int64)):
        raise ConfigError(
            f"index has shape {list(index_B.shape)} and type {index_B.dtype}; {batch} rows need [{batch}] of int32 or int64"
        )
    if A_log_H is None and lower_bound is None:
        raise ConfigError("the softplus gate (lower_bound=None) needs A_log")
    tensors = (qkv_BX, conv_weight_XW, window_BXW1, decay_logit_BHK, A_log_H, dt_bias, beta_logit_BH, gate_BHV)
    numbers = (num_heads, key_dim, lower_bound, scale, norm_eps)
    implementation = select(qkv_BX.device, qkv_BX.dtype).implementation
    if implementation in ("cuda", "triton") and readable(*tensors, norm_weight_V, state_BHVK):
        if implementation == "cuda" and cuda.unsuitable(qkv_BX, window_BXW1, state_BHVK, taps) is None:
            return cuda.decode_step(*tensors, norm_weight_V, state_BHVK, index_B, *numbers)
        if triton_obstacle(qkv_BX.device, qkv_BX.dtype) is None:
            from perilune.ops.kda.triton_decode import decode_step

            return decode_step(*tensors, norm_weight_V, state_BHVK, index_B, *numbers)
    if index_B is not None:
        return _pooled(index_B, tensors, norm_weight_V, state_BHVK, numbers)
    if implementation == "native":
        out = _native(*tensors, norm_weight_V, state_BHVK, *numbers)
        if out is not None:
            return out
    with torch.no_grad():
        return _torch(*tensors, norm_weight_V, state_BHVK, *numbers)


def _pooled(index: Tensor, tensors: tuple, norm_weight: Tensor, state: Tensor, numbers: tuple) -> Tensor:
    """Copy the rows' slots out of the pools, advance them, copy them back."""
    qkv, conv_weight, window, *rest = tensors
    if index.numel() and int(index.max()) >= state.shape[0]:
        raise ConfigError(f"index names slot {int(index.max())} of a pool of {state.shape[0]}")
    alive = index >= 0
    slots = index[alive].long()
    windows, states = window[slots], state[slots]
    decay_logit, A_log, dt_bias, beta_logit, gate = rest
    heads, key_dim, lower_bound, scale, norm_eps = numbers
    out = qkv.new_zeros(qkv.shape[0], heads * norm_weight.shape[0])
    out[alive] = kda_decode_step(
        qkv[alive], conv_weight, windows, decay_logit[alive], A_log, dt_bias, beta_logit[alive], gate[alive],
        norm_weight, states, num_heads=heads, key_dim=key_dim, lower_bound=lower_bound, scale=scale, norm_eps=norm_eps,
    )  # fmt: skip
    window[slots], state[slots] = windows, states
    return out


def _torch(
    qkv: Tensor,
    conv_weight: Tensor,
    window: Tensor,
    decay_logit: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_logit: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    heads: int,
    key_dim: int,
    lower_bound: float | None,
    scale: float,
    norm_eps: float,
) -> Tensor:
    dtype = compute_dtype(qkv)
    batch, value_dim = qkv.shape[0], norm_weight.shape[0]
    line = torch.cat([window.to(dtype), qkv.to(dtype).unsqueeze(-1)], dim=-1)
    window.copy_(line[..., 1:])
    mixed = silu((line * conv_weight.to(dtype)).sum(-1))
    q, k, v = mixed.split([heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
    q, k = (x.reshape(batch, heads, key_dim) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    g = fused_kda_gate(decay_logit.reshape(batch, heads, key_dim).to(dtype), A_log, dt_bias, lower_bound)
    state.mul_(g.exp().unsqueeze(-2))
    beta = torch.sigmoid(beta_logit.to(dtype)).view(batch, heads, 1)
    u = beta * (v.reshape(batch, heads, value_dim) - (state @ k.unsqueeze(-1)).squeeze(-1))
    state.add_(u.unsqueeze(-1) * k.unsqueeze(-2))
    o = scale * (state @ q.unsqueeze(-1)).squeeze(-1)
    o = o * (o.square().mean(-1, keepdim=True) + norm_eps).rsqrt() * norm_weight.to(dtype)
    o = o * torch.sigmoid(gate.reshape(batch, heads, value_dim).to(dtype))
    return o.reshape(batch, heads * value_dim).to(qkv.dtype)


def row_stride(x: Tensor, batch: int) -> int | None:
    """Numbers from one row of `[B, ...]` to the next if the numbers of a row lie side by side, else None."""
    if x.is_contiguous():
        return x.numel() // batch if batch else 0
    inner = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x.stride(0) if inner else None


def readable(
    qkv: Tensor,
    conv_weight: Tensor,
    window: Tensor,
    decay_logit: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_logit: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    state: Tensor,
) -> bool:
    """Whether the tensors have the layout that the kernels read: activations of one element type whose rows are dense,
    dense float32 parameters and states, and a dense window."""
    for logits in (decay_logit, beta_logit, gate):
        if logits.dtype != qkv.dtype:
            return False
    for parameter in (conv_weight, A_log, dt_bias, norm_weight, state):
        if parameter is not None and (parameter.dtype != torch.float32 or not parameter.is_contiguous()):
            return False
    if not window.is_contiguous() or conv_weight.shape[1] > MAX_TAPS:
        return False
    if max(state.shape[2:]) > MAX_KEY_DIM:
        return False
    return None not in [row_stride(x, qkv.shape[0]) for x in (qkv, decay_logit, beta_logit, gate)]


@lru_cache
def _entry() -> Callable[..., None]:
    library = load("kda_decode")
    assert library is not None, "select() chose the native kernel without having it"
    entry = library.kda_decode
    entry.argtypes, entry.restype = (ctypes.POINTER(_Struct),), None
    return entry


def _native(
    qkv: Tensor,
    conv_weight: Tensor,
    window: Tensor,
    decay_logit: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_logit: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    heads: int,
    key_dim: int,
    lower_bound: float | None,
    scale: float,
    norm_eps: float,
) -> Tensor | None:
    """The C call; None where the tensors' layout is not the one it reads (then the caller takes the torch form)."""
    if window.dtype not in TYPES or not readable(
        qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate, norm_weight, state
    ):
        return None
    tensors = (qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate, norm_weight, state)
    return call_native(*tensors, heads, key_dim, lower_bound, scale, norm_eps)


def call_native(
    qkv: Tensor,
    conv_weight: Tensor,
    window: Tensor,
    decay_logit: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_logit: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    heads: int,
    key_dim: int,
    lower_bound: float | None,
    scale: float,
    norm_eps: float,
    page_B: Tensor | None = None,
) -> Tensor:
    """The C call on operands that were checked; with `page_B`, window and state are pools whose pages lie by head."""
    dtype, window_dtype, batch = qkv.dtype, window.dtype, qkv.shape[0]
    value_dim, taps = norm_weight.shape[0], conv_weight.shape[1]
    strides_of_pages = (0, 0, 0, 0)
    if page_B is not None:
        strides_of_pages = (state.stride(0), state.stride(1), window.stride(0), window.stride(1))
    strides = [row_stride(x, batch) for x in (qkv, decay_logit, beta_logit, gate)]
    out = torch.empty(batch, heads * value_dim, dtype=dtype)
    struct = _Struct(
        batch,
        heads,
        key_dim,
        value_dim,
        taps,
        torch.get_num_threads(),
        *strides,
        TYPES[dtype],
        TYPES[window_dtype],
        lower_bound is not None,
        scale,
        lower_bound or 0.0,
        norm_eps,
        0.0,
        conv_weight.data_ptr(),
        None if A_log is None else A_log.data_ptr(),
        None if dt_bias is None else dt_bias.data_ptr(),
        norm_weight.data_ptr(),
        window.data_ptr(),
        state.data_ptr(),
        qkv.data_ptr(),
        decay_logit.data_ptr(),
        beta_logit.data_ptr(),
        gate.data_ptr(),
        out.data_ptr(),
        None if page_B is None else page_B.data_ptr(),
        *strides_of_pages,
    )
    _entry()(struct)
    return out
