"""Causal softmax attention with keys and values of different width, no positions: the expanded form of MLA.

    o[t] = sum over s <= past + t of softmax_s(scale q[t].k[s]) v[s]                 (architecture §4.1)

Packed documents: a query sees keys of its own document only. Training keeps the output in fp32 up to the output gate,
to remove the biased rounding error of a half-precision attention output (report §2.1.2): `fp32_output`.

Implementations: "native" (C, float32 on a CPU), "cuda" (Hopper, bfloat16, the widths of `cuda.attend.WIDTHS`), "triton" (CUDA: half
precision with an output in fp32, packed documents and queries behind a cache without a mask), "torch"
(`scaled_dot_product_attention`, whatever it takes).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.mla import native
from perilune.ops.mla.cuda import attend as cuda
from perilune.ops.mla.max_logit import max_logit
from perilune.ops.native.blas import multiplies_bf16
from perilune.ops.segments import Segments
from perilune.ops.triton import available

TOKENS_PER_CALL = 32  # documents shorter than this on average are masked in one call, longer ones get a call each
KERNEL_WIDTHS = 192, 128  # largest key and value of the Triton kernels
_CUDA = Choice("cuda", "warps that copy beside two groups of warps that multiply; rows not at 16 bytes: Triton")


def select(
    q_BTHK: Tensor,
    k_BSHK: Tensor | None = None,
    v_BSHV: Tensor | None = None,
    segments: Segments | None = None,
    past: int = 0,
    fp32_output: bool = True,
    scale: float = 1.0,
) -> Choice:
    """Return which implementation `attend` takes for these arguments, and why; keys and values default to the queries' kind."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    k_BSHK, v_BSHV = (q_BTHK if x is None else x for x in (k_BSHK, v_BSHV))
    if wanted == "cuda":
        reason = _cuda_obstacle(q_BTHK, k_BSHK, v_BSHV, scale)
        return _CUDA if reason is None else Choice("torch", f"cuda was asked for, but {reason}")
    if (choice := available.choose(q_BTHK, k_BSHK, v_BSHV)) is not None:
        if choice.implementation != "triton" or wanted == "triton":
            return choice
        if q_BTHK.shape[-1] > KERNEL_WIDTHS[0] or v_BSHV.shape[-1] > KERNEL_WIDTHS[1]:
            widest = " and ".join(map(str, KERNEL_WIDTHS))
            return Choice("torch", f"plain torch: the kernels take keys and values of at most {widest} channels")
        if (obstacle := _cuda_obstacle(q_BTHK, k_BSHK, v_BSHV, scale)) is None:
            return _CUDA
        masked = segments is not None or (past > 0 and q_BTHK.shape[1] > 1)
        if not masked and q_BTHK.dtype == torch.float32:
            return Choice("torch", "torch's own kernel: float32 without packed documents gains nothing from ours")
        if not masked and not fp32_output:
            return Choice("torch", "torch's own kernel: an output in the inputs' dtype and no packed documents")
        return Choice("triton", f"Triton kernels: {obstacle}")
    reason = native.why_no_attention(q_BTHK)
    return (
        Choice("torch", reason) if reason else Choice("native", "blocks of queries on torch's BLAS, no [T, T] per head")
    )


def attend(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    scale: float,
    segments: Segments | None = None,
    past: int = 0,
    fp32_output: bool = True,
    largest_H: Tensor | None = None,
) -> Tensor:
    """Causal attention.

    Args:
        q_BTHK: `[B, T, H, K]` queries of the T newest tokens.
        k_BSHK: `[B, S, H, K]` keys, S = past + T.
        v_BSHV: `[B, S, H, V]` values; V may differ from K.
        scale: factor on q.k.
        segments: packed documents over the B*T tokens; then `past` must be 0.
        past: tokens cached before the first query.
        fp32_output: return at least fp32 instead of the inputs' dtype, never rounded below it on the way.
        largest_H: `[H]`, raised in place to each head's largest scale q.k of a query and a key that it sees (QK-clip), which costs
            next to nothing where a kernel finds it on its way ("cuda"), and else what `max_logit` costs; no gradient.

    Returns:
        `[B, T, H, V]`.
    """
    tokens, keys = q_BTHK.shape[1], k_BSHK.shape[1]
    assert keys == past + tokens, f"{tokens} queries after {past} cached tokens need {past + tokens} keys, got {keys}"
    assert segments is None or past == 0, "packed documents cannot follow a cache"
    given = q_BTHK.dtype
    wide = torch.promote_types(given, torch.float32)
    choice = select(q_BTHK, k_BSHK, v_BSHV, segments, past, fp32_output, scale).implementation
    if choice in ("cuda", "triton"):
        from perilune.ops.mla import attend_device

        out_dtype = wide if fp32_output else given
        operands = q_BTHK, k_BSHK, v_BSHV, scale, segments, past, out_dtype, largest_H
        return attend_device.attend(*operands, in_cuda=choice == "cuda")
    if largest_H is not None:
        largest_H.copy_(torch.maximum(largest_H, max_logit(q_BTHK, k_BSHK, scale, segments, past).to(largest_H)))
    if fp32_output or (q_BTHK.is_cpu and not multiplies_bf16()):
        q_BTHK, k_BSHK, v_BSHV = q_BTHK.to(wide), k_BSHK.to(wide), v_BSHV.to(wide)
    if select(q_BTHK).implementation == "native":
        out_BTHV = native.attention(q_BTHK, k_BSHK, v_BSHV, scale, segments, past)
    elif segments is None:
        out_BTHV = _sdpa(q_BTHK, k_BSHK, v_BSHV, scale, past)
    else:
        out_BTHV = _packed(q_BTHK, k_BSHK, v_BSHV, scale, segments)
    return out_BTHV.to(wide if fp32_output else given)


def _cuda_obstacle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> str | None:
    if any(x.dtype != q.dtype or x.device != q.device for x in (k, v)):
        return "keys and values differ from the queries in element type or device"
    return cuda.why_not(q, k, v, scale)


def _sdpa(q_BTHK, k_BSHK, v_BSHV, scale, past=0, mask=None):
    width = v_BSHV.shape[-1]
    tokens, keys = q_BTHK.shape[1], k_BSHK.shape[1]
    # torch's blocked kernels need equal widths; padding V with zeros is far cheaper than the unblocked path.
    if width < k_BSHK.shape[-1]:
        v_BSHV = F.pad(v_BSHV, (0, k_BSHK.shape[-1] - width))
    if past and tokens > 1 and mask is None:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=q_BTHK.device).tril(past)
    heads_first = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHV))
    causal = mask is None and tokens > 1
    out_BHTV = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=causal, scale=scale)
    return out_BHTV.transpose(1, 2)[..., :width]


def _packed(q_BTHK, k_BSHK, v_BSHV, scale, segments):
    batch, tokens = q_BTHK.shape[:2]
    documents = len(segments.cu_seqlens) - 1
    if documents * TOKENS_PER_CALL > batch * tokens:
        ids_BT = segments.segment_id_BT
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BTHK.device).tril()
        same_BTT = (ids_BT[:, :, None] == ids_BT[:, None, :]) & causal
        return _sdpa(q_BTHK, k_BSHK, v_BSHV, scale, mask=same_BTT[:, None])
    lengths = [length for length in segments.cu_seqlens.diff().tolist() if length]
    pieces = (x.flatten(0, 1).split(lengths) for x in (q_BTHK, k_BSHK, v_BSHV))
    out = [_sdpa(q[None], k[None], v[None], scale)[0] for q, k, v in zip(*pieces)]
    return torch.cat(out).view(batch, tokens, *out[0].shape[1:])
