"""Check the arguments of the KDA entry points once, and bring them to the form that every implementation takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.kda.gate import compute_dtype, fused_kda_gate

if TYPE_CHECKING:
    from perilune.ops.kda.gpu.plan import Plan

L2_EPS = 1e-6  # added to the sum of squares, not to their mean (architecture: q / sqrt(sum q^2 + 1e-6))
MAX_KEY_DIM = 256
CHUNK_SIZES = (16, 32, 64)
LOWEST_BOUND = -5.0  # fifteen steps of e^-5 inside a 16-row tile stay within float32; see `chunked`


@dataclass(frozen=True)
class Arguments:
    """Validated arguments. `offsets` are the N+1 sequence boundaries over the flattened B*T tokens; with a `plan` only
    their ends, 0 and B*T."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    scale: float
    output_final_state: bool
    l2_norm: bool
    gate: bool
    beta_sigmoid: bool
    beta_scale: float
    safe_gate: bool
    lower_bound: float | None
    state_v_first: bool
    offsets: tuple[int, ...]
    plan: Plan | None = None

    @property
    def batch(self) -> int:
        """Rows B of the input."""
        return self.q.shape[0]

    @property
    def sequences(self) -> int:
        """Independent sequences N: B, or the count in cu_seqlens."""
        return len(self.offsets) - 1

    @property
    def heads(self) -> int:
        """Value heads HV."""
        return self.v.shape[2]

    @property
    def key_dim(self) -> int:
        """Key channels K of a head."""
        return self.q.shape[3]

    @property
    def value_dim(self) -> int:
        """Value channels V of a head."""
        return self.v.shape[3]

    @property
    def bounded(self) -> bool:
        """True if no log-decay is below `LOWEST_BOUND`: by the gate's form, or by the caller's promise."""
        return self.lower_bound is not None if self.gate else self.safe_gate

    @property
    def dtype(self) -> torch.dtype:
        """float64 if any input is, else float32."""
        return compute_dtype(self.q, self.k, self.v, self.g, self.beta)

    def state_K_first(self) -> Tensor:
        """The entry state in the compute dtype as `[N, HV, K, V]`, zeros if none was given."""
        if self.initial_state is None:
            shape = (self.sequences, self.heads, self.key_dim, self.value_dim)
            return torch.zeros(shape, dtype=self.dtype, device=self.q.device)
        state = self.initial_state.to(self.dtype)
        return state.transpose(-1, -2) if self.state_v_first else state

    def final_state(self, state_NHKV: Tensor) -> Tensor | None:
        """Bring a final state to the caller's layout; None if the caller did not ask for it."""
        if not self.output_final_state:
            return None
        return (state_NHKV.transpose(-1, -2) if self.state_v_first else state_NHKV).contiguous()


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    plan: Plan | None = None,
) -> Arguments:
    """Validate; see `perilune.ops.kda.api.chunk_kda` for the meaning of each argument.

    Raises:
        ConfigError: a shape, a dtype, a state count, `cu_seqlens`, or a gate setting does not fit.
    """
    for name, tensor, rank in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 4), ("beta", beta, 3)):
        if tensor.dim() != rank:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; a tensor of {rank} dimensions is needed")
    batch, length, qk_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    wanted = {
        "k": (k, (batch, length, qk_heads, key_dim)),
        "v": (v, (batch, length, heads, value_dim)),
        "g": (g, (batch, length, heads, key_dim)),
        "beta": (beta, (batch, length, heads)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; with q {tuple(q.shape)} it must be {shape}")
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta), ("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and x.device != q.device:
            raise ConfigError(f"{name} is on {x.device} and q on {q.device}; bring all tensors to one device")
    if initial_state is not None and initial_state.device != q.device:
        raise ConfigError(f"initial_state is on {initial_state.device} and q on {q.device}; bring it there with .to()")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must have one dtype")
    if heads % qk_heads:
        raise ConfigError(f"v has {heads} heads; that must be a multiple of the {qk_heads} heads of q and k")
    if not 1 <= key_dim <= MAX_KEY_DIM:
        raise ConfigError(f"q and k have {key_dim} channels a head; allowed: 1 to {MAX_KEY_DIM}")
    if lower_bound is not None and not LOWEST_BOUND <= lower_bound < 0.0:
        raise ConfigError(
            f"lower_bound={lower_bound} must lie in [{LOWEST_BOUND:g}, 0); use None for the softplus gate"
        )
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ConfigError("use_gate_in_kernel=True with lower_bound=None needs A_log [HV]; pass A_log or a lower_bound")
    if use_gate_in_kernel and safe_gate and lower_bound is None:
        raise ConfigError("safe_gate=True with the in-kernel gate needs a lower_bound in [-5, 0)")
    if A_log is not None and A_log.shape != (heads,):
        raise ConfigError(f"A_log has shape {tuple(A_log.shape)}; with {heads} value heads it must be ({heads},)")
    if dt_bias is not None and dt_bias.numel() != heads * key_dim:
        raise ConfigError(f"dt_bias has shape {tuple(dt_bias.shape)}; it must hold HV*K = {heads * key_dim} numbers")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ConfigError("allow_neg_eigval=True doubles the in-kernel sigmoid; set use_beta_sigmoid_in_kernel=True")
    if plan is not None and (batch != 1 or initial_state is not None or output_final_state):
        raise ConfigError("plan= takes one row of packed sequences (B = 1) without initial and final state")
    offsets = (0, length) if plan is not None else _offsets(cu_seqlens, batch, length)
    if initial_state is not None:
        inner = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
        shape = (len(offsets) - 1, heads, *inner)
        if initial_state.shape != shape:
            layout = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
            raise ConfigError(f"initial_state has shape {tuple(initial_state.shape)}; {layout} = {shape} is needed")
        if initial_state.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"initial_state is {initial_state.dtype}; the state is float32, convert it with .float()")
    return Arguments(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None,
        initial_state=initial_state,
        scale=key_dim**-0.5 if scale is None else float(scale),
        output_final_state=output_final_state,
        l2_norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
        safe_gate=safe_gate,
        lower_bound=lower_bound if use_gate_in_kernel else None,
        state_v_first=state_v_first,
        offsets=offsets,
        plan=plan,
    )


def _offsets(cu_seqlens: Tensor | Sequence[int] | None, batch: int, length: int) -> tuple[int, ...]:
    if cu_seqlens is None:
        return tuple(range(0, (batch + 1) * length, length)) if length else (0,) * (batch + 1)
    if batch != 1:
        raise ConfigError(f"cu_seqlens needs B = 1, not B = {batch}; flatten the rows into one, [1, B*T, ...]")
    offsets = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != length or any(b < a for a, b in pairwise(offsets)):
        raise ConfigError(f"cu_seqlens={list(offsets)[:9]} must rise from 0 to T = {length} (N+1 numbers)")
    return offsets


def prepare(args: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalised q and k, v, log-decay g and beta in the compute dtype, by differentiable torch operations."""
    dtype = args.dtype
    q, k, v, beta = (x.to(dtype) for x in (args.q, args.k, args.v, args.beta))
    if args.l2_norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    g = fused_kda_gate(args.g.to(dtype), args.A_log, args.dt_bias, args.lower_bound) if args.gate else args.g.to(dtype)
    if args.beta_sigmoid:
        beta = args.beta_scale * torch.sigmoid(beta)
    return q, k, v, g, beta
