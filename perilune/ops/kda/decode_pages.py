"""`kda_decode_step` on states that lie in pages of a pool, head by head, as a prefix cache keeps and ships them.

Kernels work in the pages, on the CPU and on Hopper; elsewhere the rows' states are copied out, advanced, and copied back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.kda.arguments import MAX_KEY_DIM
from perilune.ops.kda.cuda import decode as cuda
from perilune.ops.kda.decode import MAX_TAPS, TYPES, call_native, row_stride
from perilune.ops.kda.decode import select as select_step
from perilune.ops.linear import linear


def select(qkv_BX: Tensor, window_PHw: Tensor, state_PHVK: Tensor) -> Choice:
    """Say whether `kda_decode_pages` works in the pages ("native", "cuda") or on copies ("torch"), and why."""
    step = select_step(qkv_BX.device, qkv_BX.dtype)
    if step.implementation == "cuda":
        taps = window_PHw.shape[2] // (2 * state_PHVK.shape[3] + state_PHVK.shape[2]) + 1
        reason = cuda.unsuitable(qkv_BX, window_PHw, state_PHVK, taps)
        return Choice("torch", f"copies of the rows' states: {reason}") if reason else step
    if step.implementation != "native":
        return Choice("torch", f"copies of the rows' states: {step.reason}")
    inner = state_PHVK.shape[3]
    if state_PHVK.dtype is not torch.float32 or window_PHw.dtype not in TYPES:
        return Choice("torch", "copies of the rows' states: matrices are not float32, or the window is in another type")
    if state_PHVK.stride()[2:] != (inner, 1) or window_PHw.stride(2) != 1:
        return Choice("torch", "copies of the rows' states: a head's numbers do not lie side by side")
    return Choice("native", "the C kernel works in the pages")


def kda_decode_pages(
    qkv_BX: Tensor,
    conv_weight_XW: Tensor,
    window_PHw: Tensor,
    decay_logit_BHK: Tensor,
    A_log_H: Tensor | None,
    dt_bias: Tensor | None,
    beta_logit_BH: Tensor,
    gate_BHV: Tensor,
    norm_weight_V: Tensor,
    state_PHVK: Tensor,
    page_B: Tensor,
    *,
    num_heads: int,
    key_dim: int,
    lower_bound: float | None,
    scale: float,
    norm_eps: float,
    decay_up_OR: Tensor | None = None,
) -> Tensor | None:
    """Advance every row by one token in its page; no gradient.

    Args:
        window_PHw: the pool, seen as windows `[pages, H, (2K+V)(W-1)]`: of each head q, k and v channels; IN PLACE.
        state_PHVK: the pool, seen as matrices `[pages, H, V, K]`; IN PLACE.
        page_B: int64, the page of each row; no two are the same.
        decay_up_OR: `[H K, R]`; then `decay_logit_BHK` is `[B, R]`, and the logits are its product with this matrix.
        The others: see `kda_decode_step`.

    Returns:
        `[B, H * V]` in the dtype of `qkv_BX`, or None where `select` finds that copies are needed; nothing was changed then.
    """
    choice = select(qkv_BX, window_PHw, state_PHVK).implementation
    if choice not in ("native", "cuda"):
        return None
    if decay_up_OR is not None and not (choice == "cuda" and cuda.projects(decay_logit_BHK, decay_up_OR)):
        decay_logit_BHK, decay_up_OR = linear(decay_logit_BHK, decay_up_OR), None
    logits = (decay_logit_BHK, beta_logit_BH, gate_BHV)
    parameters = (conv_weight_XW, A_log_H, dt_bias, norm_weight_V)
    dense = all(p is None or (p.dtype is torch.float32 and p.is_contiguous()) for p in parameters)
    rows = all(x.dtype is qkv_BX.dtype and row_stride(x, qkv_BX.shape[0]) is not None for x in (qkv_BX, *logits))
    if not dense or not rows or conv_weight_XW.shape[1] > MAX_TAPS or max(state_PHVK.shape[2:]) > MAX_KEY_DIM:
        return None
    tensors = (
        qkv_BX, conv_weight_XW, window_PHw, decay_logit_BHK, A_log_H, dt_bias, beta_logit_BH, gate_BHV, norm_weight_V, state_PHVK,
    )  # fmt: skip
    numbers = (num_heads, key_dim, lower_bound, scale, norm_eps)
    if choice == "cuda":
        return cuda.decode_step(*tensors, page_B, *numbers, by_head=True, decay_up=decay_up_OR)
    return call_native(*tensors, *numbers, page_B)
