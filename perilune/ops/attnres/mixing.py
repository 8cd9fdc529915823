"""One read of the residual stream: mix M depth sources by softmax attention (report §2.2, Eq. 8-10).

    s_i = <v_i, c> / sqrt(mean(v_i^2) + eps),   p = softmax(s),   mix = sum_i p_i v_i

c is the norm weight times the pseudo-query; there is no temperature, and the values are not normalised. A read happens
twice in every layer, so for training the sources are kept by reference (they are the layers' outputs and alive anyway)
beside 2M numbers a token, and nothing of the size [M, tokens, D] is ever formed.

With g_i = <dmix, v_i>:  ds_i = p_i (g_i - sum_j p_j g_j)
    dv_i = p_i dmix + ds_i (r_i c - s_i r_i^2 v_i / D),   dc = sum over tokens and i of ds_i r_i v_i
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.errors import ConfigError
from perilune.ops.attnres import fused_read
from perilune.ops.attnres.cuda import read as cuda
from perilune.ops.attnres.reference import mix_reference, mix_weights_reference
from perilune.ops.choice import Choice, forced
from perilune.ops.native.rows import as_rows, blocks_for, choose, entry, fresh, parameter, threads_for
from perilune.ops.triton.available import choose as choose_triton

MAX_TRITON_SOURCES = 17  # each is an argument of the kernels
MAX_TRITON_WIDTH = 16384  # a program holds a whole row


_CUDA = Choice("cuda", "the rows of the next token are under way while one is mixed out of shared memory")


def select(sources: Sequence[Tensor]) -> Choice:
    """Say which implementation mixes these sources, and why."""
    if forced() == "cuda":
        obstacle = cuda.unsuitable(sources)
        return _CUDA if obstacle is None else Choice("torch", f"cuda was asked for, but {obstacle}")
    choice = choose_triton(*sources) or choose("attnres", *sources)
    if choice.implementation != "triton":
        return choice
    if forced() is None:
        obstacle = cuda.unsuitable(sources)
        if obstacle is None:
            return _CUDA
        choice = Choice("triton", f"{choice.reason}; {obstacle}")
    if len(sources) > MAX_TRITON_SOURCES:
        return Choice("torch", f"the Triton kernels mix at most {MAX_TRITON_SOURCES} sources, not {len(sources)}")
    if sources[0].shape[-1] > MAX_TRITON_WIDTH:
        width = sources[0].shape[-1]
        return Choice("torch", f"the Triton kernels take rows of at most {MAX_TRITON_WIDTH} numbers, not {width}")
    return choice


def mix(sources: Sequence[Tensor], score_weight_D: Tensor, eps: float) -> Tensor:
    """Mix depth sources by attention.

    Args:
        sources: M >= 1 tensors [..., D] of one shape and dtype: finished blocks, then the running sum.
        score_weight_D: c [D], norm weight * query.
        eps: added to the mean of squares.

    Returns:
        [..., D] in the sources' dtype. With a single source the weight is exactly 1 and that very tensor is returned
        (score_weight_D then gets no gradient); with more, a new tensor that shares memory with no source.

    Raises:
        ConfigError: no source, or shapes disagree.
    """
    check(sources, score_weight_D)
    if len(sources) == 1:
        return sources[0]
    implementation = select(sources).implementation
    if implementation == "reference":
        return mix_reference(sources, score_weight_D, eps)
    if implementation in ("cuda", "triton"):
        return fused_read.read(implementation, sources, None, score_weight_D, eps)[0]
    native = implementation == "native"
    if torch.is_grad_enabled() and (score_weight_D.requires_grad or any(source.requires_grad for source in sources)):
        return _Mix.apply(score_weight_D, eps, native, *sources)
    if native:
        return _native_forward(sources, score_weight_D, eps, statistics=False)[0]
    return _torch_forward(sources, score_weight_D, eps)[0]


def mix_weights(sources: Sequence[Tensor], score_weight_D: Tensor, eps: float) -> Tensor:
    """Return the softmax weights that `mix` gives its sources, [..., M], float32 (float64 for float64): for probes.

    Differentiable by autograd, at the cost of a stacked copy of the sources where gradients are wanted.

    Raises:
        ConfigError: no source, or shapes disagree.
    """
    check(sources, score_weight_D)
    if torch.is_grad_enabled() and (score_weight_D.requires_grad or any(source.requires_grad for source in sources)):
        return mix_weights_reference(sources, score_weight_D, eps)
    return _torch_scores(sources, score_weight_D, eps)[0].softmax(-1)


def check(sources: Sequence[Tensor], score_weight_D: Tensor) -> None:
    """Raise ConfigError unless there are sources, of one shape [..., D], and a score weight [D]."""
    if not sources:
        raise ConfigError("attention over depth got no sources; give the running sum at least")
    shape = sources[0].shape
    for source in sources:
        if source.shape != shape:
            raise ConfigError(
                f"attention over depth got sources {[list(s.shape) for s in sources]}; they must have one shape"
            )
    if score_weight_D.shape != shape[-1:]:
        raise ConfigError(
            f"the score weight has shape {list(score_weight_D.shape)}; sources {list(shape)} need [{shape[-1]}]"
        )


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score_weight_D, eps, native, *sources):
        ctx.native = native
        mixed, *statistics = (_native_forward if native else _torch_forward)(sources, score_weight_D, eps)
        ctx.save_for_backward(score_weight_D, *statistics, *sources)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, dmix):
        score_weight_D, weights, rstd, *sources = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        step = _native_backward if ctx.native else _torch_backward
        dscore_D, dsources = step(sources, score_weight_D, weights, rstd, dmix, wanted)
        return dscore_D, None, None, *dsources


def _torch_scores(sources, score_weight_D, eps):
    """Scores and rsqrt(mean square + eps) of each source, both [..., M]."""
    exact = torch.promote_types(sources[0].dtype, torch.float32)
    score_weight_D = score_weight_D.to(exact)
    squares, products = [], []
    for source in sources:
        source = source.to(exact)
        squares.append(source.square().mean(-1))
        products.append((source * score_weight_D).sum(-1))  # a matrix-vector product sums less exactly
    rstd = (torch.stack(squares, -1) + eps).rsqrt()
    return torch.stack(products, -1) * rstd, rstd


def _torch_forward(sources, score_weight_D, eps):
    scores, rstd = _torch_scores(sources, score_weight_D, eps)
    weights = scores.softmax(-1)
    mixed = sources[0].to(weights.dtype) * weights[..., :1]
    for i, source in enumerate(sources[1:], start=1):
        mixed = mixed.addcmul_(source.to(weights.dtype), weights[..., i : i + 1])
    return mixed.to(sources[0].dtype), weights, rstd


def _torch_backward(sources, score_weight_D, weights, rstd, dmix, wanted):
    exact = weights.dtype
    dmix, c_D = dmix.to(exact), score_weight_D.to(exact)
    width = c_D.shape[0]
    along = torch.stack([(dmix * source.to(exact)).sum(-1) for source in sources], -1)
    factor = weights * (along - (weights * along).sum(-1, keepdim=True)) * rstd
    dscore_D, dsources = torch.zeros_like(c_D), []
    for i, source in enumerate(sources):
        v, f, r = source.to(exact), factor[..., i : i + 1], rstd[..., i : i + 1]
        dscore_D += (f * v).reshape(-1, width).sum(0)
        if not wanted[i]:
            dsources.append(None)
            continue
        pull = (v * c_D).sum(-1, keepdim=True) * r.square() * f / width
        dsources.append((dmix * weights[..., i : i + 1] + f * c_D).sub_(pull * v).to(source.dtype))
    return dscore_D.to(score_weight_D.dtype), dsources


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def _native_sources(sources: Sequence[Tensor]) -> tuple[list[Tensor], ctypes.Array, ctypes.Array]:
    """Rows of each source (to be kept alive), their pointers and their row strides."""
    rows, strides = zip(*[as_rows(source) for source in sources], strict=True)
    return list(rows), _pointers(rows), (ctypes.c_int64 * len(strides))(*strides)


def _native_forward(sources, score_weight_D, eps, statistics=True):
    first = sources[0]
    count, width = len(sources), first.shape[-1]
    rows = first.numel() // width if width else 0
    kept, pointers, strides = _native_sources(sources)
    c_D = parameter(score_weight_D)
    mixed = fresh(first)
    weights = torch.empty(rows, count)
    rstd = torch.empty(rows, count) if statistics else None
    entry("attnres", "mix_forward", first.dtype, "pppppplllfi")(
        pointers, strides, c_D.data_ptr(), mixed.data_ptr(), weights.data_ptr(),
        None if rstd is None else rstd.data_ptr(), rows, count, width, eps,
        threads_for(rows * count * width))  # fmt: skip
    return mixed, weights, rstd


def _native_backward(sources, score_weight_D, weights, rstd, dmix, wanted):
    first = sources[0]
    rows, count = weights.shape
    width = first.shape[-1]
    blocks = blocks_for(rows)
    kept, pointers, strides = _native_sources(sources)
    dmix_rows, dmix_stride = as_rows(dmix)
    c_D = parameter(score_weight_D)
    dsources = [fresh(first) if want else None for want in wanted]
    partial, dscore_D = torch.empty(blocks, width + 2 * count), torch.empty(width)
    entry("attnres", "mix_backward", first.dtype, "ppppl" + "ppppp" + "lllli")(
        pointers, strides, c_D.data_ptr(), dmix_rows.data_ptr(), dmix_stride, weights.data_ptr(), rstd.data_ptr(),
        _pointers(dsources), partial.data_ptr(), dscore_D.data_ptr(), blocks, rows, count, width,
        threads_for(rows * count * width))  # fmt: skip
    return dscore_D.to(score_weight_D.dtype), dsources
