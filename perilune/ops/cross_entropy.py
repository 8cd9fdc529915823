"""Cross-entropy of a linear head without its logits.

    loss_n = logsumexp(W x_n) - (W x_n)[target_n]          in nats

The head's logits are the largest tensor of a small model (tokens * vocabulary). They are formed for one chunk of tokens
at a time; where gradients are wanted, the same pass turns the chunk into softmax - onehot and multiplies it into dx and
dW, so nothing of that size is kept and the head's product is not repeated. Matrix products are in x's dtype, the softmax
and the sum of dW over chunks in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.errors import ConfigError, RequestError
from perilune.ops.choice import Choice
from perilune.ops.narrow import in_dtype
from perilune.ops.native.blas import multiplies_bf16
from perilune.ops.native.rows import choose, entry, threads_for
from perilune.ops.triton.available import choose as choose_triton

CPU_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32 logits: stays near the cores' caches
DEVICE_CHUNK_ELEMENTS = 1 << 26  # 256 MiB: large enough for full-rate products
MIN_CHUNK = 16
REDUCTIONS = ("mean", "sum", "none")


def select(x_ND: Tensor) -> Choice:
    """Say which implementation turns a chunk of logits into loss and gradient, and why."""
    return choose_triton(x_ND) or choose("elementwise", x_ND)


def linear_cross_entropy(
    x_ND: Tensor,
    weight_ZD: Tensor,
    target_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of `x @ weight.T` against targets.

    Args:
        x_ND: [N, D] hidden states.
        weight_ZD: [Z, D] output embedding; cast to x's dtype for the products, its gradient has its own dtype.
        target_N: [N] int64 token ids; `ignore_index` marks tokens that count for nothing.
        ignore_index: see target_N.
        reduction: "mean" over the tokens that count (NaN if there is none), "sum", or "none" for [N] (0 where ignored).
        chunk: tokens whose logits exist at a time; None chooses by the vocabulary's size.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs).

    Raises:
        ConfigError: shapes disagree, or reduction or chunk is unknown.
        RequestError: a target lies outside the vocabulary (checked on the CPU only; on a GPU its loss is NaN).
    """
    _check(x_ND, weight_ZD, target_N, reduction, chunk)
    tokens, kept = len(x_ND), None
    if x_ND.device.type == "cpu":  # elsewhere a data-dependent shape would stall the device
        kept = (target_N != ignore_index).nonzero().flatten()
        if len(kept) == tokens:
            kept = None
        else:
            x_ND, target_N = x_ND.index_select(0, kept), target_N.index_select(0, kept)
        _check_range(target_N, len(weight_ZD), kept)
    if x_ND.dtype == torch.bfloat16 and x_ND.is_cpu and not multiplies_bf16():
        x_ND = x_ND.float()  # the same losses: softmax runs in fp32 anyway, and this CPU does not multiply bf16
    if chunk is None:
        elements = CPU_CHUNK_ELEMENTS if x_ND.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
        chunk = max(MIN_CHUNK, elements // len(weight_ZD))
    implementation = select(x_ND).implementation
    # Under no_grad a Function's needs_input_grad still says yes, so the wish is decided here.
    early = torch.is_grad_enabled() and reduction != "none"
    wanted = (early and x_ND.requires_grad, early and weight_ZD.requires_grad)
    settings = (ignore_index, chunk, implementation)
    loss = _LinearCrossEntropy.apply(x_ND, weight_ZD, target_N, settings, reduction != "none", wanted)
    if reduction == "sum":
        return loss
    if reduction == "mean":
        return loss / (target_N != ignore_index).sum()
    return loss if kept is None else loss.new_zeros(tokens).index_copy(0, kept, loss)


def _check(x_ND: Tensor, weight_ZD: Tensor, target_N: Tensor, reduction: str, chunk: int | None) -> None:
    if (
        x_ND.dim() != 2
        or weight_ZD.dim() != 2
        or x_ND.shape[1] != weight_ZD.shape[1]
        or target_N.shape != x_ND.shape[:1]
    ):
        raise ConfigError(
            f"linear_cross_entropy got x {list(x_ND.shape)}, weight {list(weight_ZD.shape)}, target {list(target_N.shape)}; "
            "it needs [N, D], [Z, D], [N]"
        )
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is not known; allowed: {', '.join(REDUCTIONS)}")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk={chunk} must be at least 1 token, or none to choose by the vocabulary's size")


def _check_range(target_N: Tensor, vocabulary: int, kept: Tensor | None) -> None:
    outside = ((target_N < 0) | (target_N >= vocabulary)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        position = first if kept is None else int(kept[first])
        raise RequestError(
            f"target {int(target_N[first])} at token {position} lies outside the vocabulary 0..{vocabulary - 1}; "
            "was the data tokenized with another tokenizer?"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed loss with the gradients computed at once, or losses per token with the logits recomputed in backward (the
    tokens' factors are not known before)."""

    @staticmethod
    def forward(ctx, x_ND, weight_ZD, target_N, settings, summed, wanted):
        ctx.settings, ctx.summed = settings, summed
        loss_N, dx_ND, dweight_ZD = _pass(x_ND, weight_ZD, target_N, *settings, wanted, None)
        if summed:
            ctx.save_for_backward(dx_ND, dweight_ZD)
            return loss_N.sum()
        ctx.save_for_backward(x_ND, weight_ZD, target_N)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        if ctx.summed:
            # In dloss's precision: half of it would scale every gradient by a rounded number.
            dx_ND, dweight_ZD = (
                None if grad is None else (grad.to(dloss.dtype) * dloss).to(grad.dtype) for grad in ctx.saved_tensors
            )
        else:
            wanted = ctx.needs_input_grad[:2]
            _, dx_ND, dweight_ZD = _pass(*ctx.saved_tensors, *ctx.settings, wanted, dloss.contiguous())
        return dx_ND, dweight_ZD, None, None, None, None


def _pass(x_ND, weight_ZD, target_N, ignore_index, chunk, implementation, wanted, scale_N):
    """One pass over all chunks: losses [N], and dx and dW of sum(scale * loss) where wanted (else None)."""
    tokens, vocabulary = len(x_ND), len(weight_ZD)
    exact = torch.promote_types(x_ND.dtype, torch.float32)
    head_ZD = in_dtype(weight_ZD, x_ND.dtype)
    loss_N = torch.empty(tokens, dtype=exact, device=x_ND.device)
    dx_ND = torch.empty_like(x_ND) if wanted[0] else None
    dweight_ZD = torch.zeros(weight_ZD.shape, dtype=exact, device=x_ND.device) if wanted[1] else None
    buffer = x_ND.new_empty(min(chunk, tokens), vocabulary)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        x_CD, target_C = x_ND[part], target_N[part]
        scale_C = None if scale_N is None else scale_N[part]
        logits_CZ = torch.mm(x_CD, head_ZD.t(), out=buffer[: len(x_CD)])
        step = _ROWS.get(implementation, _torch_rows)
        loss_N[part], logits_CZ = step(logits_CZ, target_C, ignore_index, any(wanted), scale_C)
        if dx_ND is not None:
            torch.mm(logits_CZ, head_ZD, out=dx_ND[part])
        if dweight_ZD is None:
            continue
        if exact == x_ND.dtype:
            dweight_ZD.addmm_(logits_CZ.t(), x_CD)
        elif x_ND.is_cuda:
            dweight_ZD += torch.mm(logits_CZ.t(), x_CD, out_dtype=exact)
        else:
            dweight_ZD += logits_CZ.t() @ x_CD
    return loss_N, dx_ND, None if dweight_ZD is None else dweight_ZD.to(weight_ZD.dtype)


def _torch_rows(logits_CZ, target_C, ignore_index, gradient, scale_C):
    """Losses of a chunk, and its logits overwritten by their gradient."""
    dtype = logits_CZ.dtype
    logits_CZ = logits_CZ.to(torch.promote_types(dtype, torch.float32))
    ignored_C = target_C == ignore_index
    index_C1 = target_C.masked_fill(ignored_C, 0)[:, None]
    top_C1 = logits_CZ.amax(-1, keepdim=True)
    chosen_C1 = logits_CZ.gather(1, index_C1)
    sum_C1 = logits_CZ.sub_(top_C1).exp_().sum(-1, keepdim=True)
    loss_C = (sum_C1.log() + top_C1 - chosen_C1)[:, 0].masked_fill(ignored_C, 0.0)
    if gradient:
        factor_C1 = torch.ones_like(sum_C1) if scale_C is None else scale_C[:, None]
        factor_C1 = factor_C1.masked_fill(ignored_C[:, None], 0.0)
        logits_CZ.mul_(factor_C1 / sum_C1).scatter_add_(1, index_C1, -factor_C1)
    return loss_C, logits_CZ.to(dtype)


def _native_rows(logits_CZ, target_C, ignore_index, gradient, scale_C):
    tokens, vocabulary = logits_CZ.shape
    target_C = target_C.to(torch.int64).contiguous()
    loss_C = torch.empty(tokens)
    entry("elementwise", "cross_entropy_rows", logits_CZ.dtype, "ppplpllii")(
        logits_CZ.data_ptr(), target_C.data_ptr(), loss_C.data_ptr(), tokens,
        None if scale_C is None else scale_C.data_ptr(), vocabulary, ignore_index, int(gradient),
        threads_for(logits_CZ.numel()))  # fmt: skip
    return loss_C, logits_CZ


def _triton_rows(logits_CZ, target_C, ignore_index, gradient, scale_C):
    from perilune.ops.triton.cross_entropy import rows

    return rows(logits_CZ, target_C, ignore_index, gradient, scale_C), logits_CZ


_ROWS = {"native": _native_rows, "triton": _triton_rows}
