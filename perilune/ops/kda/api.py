"""Entry points that stand in for flash-linear-attention's: same names, argument order, shapes and conventions.

Up to `use_beta_sigmoid_in_kernel` the arguments may be positional, in that library's order; the rest is keyword-only
(its releases differ in the order of those). Gated DeltaNet is the same operation with one decay a head: pass
`g = log_decay[..., None].expand(..., K)` and `use_gate_in_kernel=False`.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.kda.arguments import CHUNK_SIZES, Arguments, check
from perilune.ops.kda.boundaries import boundaries
from perilune.ops.kda.chunked import chunked
from perilune.ops.kda.gpu import known
from perilune.ops.kda.gpu import support as gpu
from perilune.ops.kda.native import native, native_recurrent, unsuitable
from perilune.ops.kda.reference import recurrent_reference

if TYPE_CHECKING:
    from perilune.ops.kda.gpu.plan import Plan


def select(device: torch.device | str, *dtypes: torch.dtype) -> Choice:
    """Say which implementation `chunk_kda` runs for inputs of these dtypes on `device`, and why; see also `choose`."""
    wanted, device = forced(), torch.device(device)
    if wanted in ("reference", "torch"):
        return Choice(wanted, "demanded by PERILUNE_OPS or force()")
    if device.type == "cuda" or wanted == "triton":
        obstacle = gpu.dtype_obstacle(device, *dtypes)
        if obstacle is None:
            return Choice("triton", gpu.kernels(device))
        if device.type == "cuda":
            return Choice("torch", f"chunked form in plain torch: {obstacle}")
    obstacle = unsuitable(device, *dtypes)
    if obstacle is None:
        return Choice("native", "C kernel, float32 inside")
    return Choice("torch", f"chunked form in plain torch: {obstacle}")


def choose(args: Arguments) -> Choice:
    """As `select`, for one call: the GPU kernels do not take every shape and gate."""
    choice = select(args.q.device, *(x.dtype for x in (args.q, args.k, args.v, args.g, args.beta)))
    if choice.implementation == "triton":
        obstacle = gpu.unsuitable(args)
        if obstacle is not None:
            return Choice("torch", f"chunked form in plain torch: {obstacle}")
    return choice


@torch.compiler.disable
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    chunk_size: int | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences, differentiable (report §2.1.1, Eq. 1; `reference` is its definition).

    Args:
        q, k: `[B, T, H, K]`, K <= 256.
        v: `[B, T, HV, V]`, HV a multiple of H; value head i reads the q and k of head i // (HV / H).
        g: `[B, T, HV, K]`; natural-log decay, or raw logits with `use_gate_in_kernel`.
        beta: `[B, T, HV]`; write strength, or raw logits with `use_beta_sigmoid_in_kernel`.
        scale: multiplies q; None = K ** -0.5.
        initial_state: float32 `[N, HV, K, V]`, or `[N, HV, V, K]` if `state_v_first`; N = B, or that of cu_seqlens.
        output_final_state: also return the state after the last token, float32, in the same layout.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g becomes `fused_kda_gate(g, A_log, dt_bias, lower_bound)`.
        use_beta_sigmoid_in_kernel: beta becomes sigmoid(beta), doubled if `allow_neg_eigval`.
        A_log: `[HV]`; dt_bias: `[HV * K]` or `[HV, K]`.
        safe_gate: without the in-kernel gate, the caller's promise that g >= -5, which allows dense tiles.
        lower_bound: in [-5, 0): the bounded gate; None: the softplus gate.
        transpose_state_layout: old name of `state_v_first`.
        cu_seqlens: int `[N+1]` boundaries of N sequences packed into one row (B = 1); empty sequences are allowed. A tensor on
            a device is read once, and again after torch has written to it; see `boundaries`.
        cu_seqlens_cpu: the same on the CPU; given, nothing is copied from the device.
        chunk_size: 16, 32 or 64 rows for the torch form (its results differ by rounding); None = chosen by device. The
            GPU kernels work in 64.
        plan: the chunks of these sequences in tables that the caller refills (`gpu.padded_plan`), for the kernels of a GPU:
            a CUDA graph then serves other boundaries too. No initial or final state.

    Returns:
        `(o [B, T, HV, V] in q's dtype, final state or None)`.

    Raises:
        ConfigError: an argument does not fit (a ValueError too).
    """
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        raise ConfigError(f"chunk_size={chunk_size}; allowed: {', '.join(map(str, CHUNK_SIZES))}, or None")
    scale, lower_bound = (None if x is None else float(x) for x in (scale, lower_bound))
    v_first = _layout(state_v_first, transpose_state_layout)
    bounds = None if plan is not None else boundaries(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    key = None
    if q.is_cuda and plan is None:
        key = known.key_of(
            q, k, v, g, beta, A_log, dt_bias, initial_state, scale, output_final_state, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, v_first, bounds, chunk_size,
        )  # fmt: skip
        found = known.find(key)
        if found is not None:
            return found(q, k, v, g, beta, A_log, dt_bias, initial_state)
    args = check(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=v_first,
        cu_seqlens=bounds,
        plan=plan,
    )
    return run(args, chunk_size, key)


@torch.compiler.disable
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same function of the same arguments as `chunk_kda`, computed token by token, for few tokens and no gradient.

    Cutting a sequence anywhere and carrying the state gives bitwise the same results, which no chunked form can.

    Raises:
        ConfigError: an argument does not fit.
    """
    args = check(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=_layout(state_v_first, transpose_state_layout),
        cu_seqlens=boundaries(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu),
    )
    with torch.no_grad():
        if choose(args).implementation == "native":
            return native_recurrent(args)
        o, state = recurrent_reference(args)
        return o.to(args.q.dtype), args.final_state(state)


def _layout(state_v_first: bool, old_name: bool | None) -> bool:
    if old_name is None:
        return state_v_first
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return old_name


def run(args: Arguments, chunk_size: int | None = None, key: Hashable = None) -> tuple[Tensor, Tensor | None]:
    """Run a checked call by the implementation that `choose` takes; a call with an equal `key` need not be checked again."""
    implementation = choose(args).implementation
    if implementation == "native" and chunk_size is None and args.plan is None:
        return native(args)
    if implementation == "triton" and chunk_size in (None, 64):
        from perilune.ops.kda.gpu.autograd import kda_gpu

        return kda_gpu(args, key)
    if args.plan is not None:
        raise ConfigError(f"plan= is for the kernels of a GPU, not for this call ({choose(args).reason}); leave it out")
    if implementation == "reference":
        o, state = recurrent_reference(args)
    else:
        o, state = chunked(args, chunk_size)
    return o.to(args.q.dtype), args.final_state(state)
