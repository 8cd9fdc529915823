"""Kimi Delta Attention on CPU cores through `ops/native/kda.c`: forward, backward, and the conditions for using it.

The C code takes the raw arguments (normalisation, gate and sigmoid included) and the caller's strides, so nothing is
copied or converted on the way in. What is kept for the backward pass: the inputs, and the state at every 64th token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.errors import CapacityError
from perilune.ops.kda.arguments import Arguments
from perilune.ops.native.build import load, unavailable_reason

SEGMENT = 64  # PL_SEGMENT in kda_chunk.h
TYPES = {torch.float32: 0, torch.bfloat16: 1}

_INTEGERS = (
    "sequences heads qk_heads key_dim value_dim threads q_stride k_stride v_stride g_stride beta_stride "
    "type g_type beta_type dqk_type l2_norm gate bounded beta_sigmoid state_v_first"
).split()
_FLOATS = "scale lower_bound beta_scale unused".split()
_POINTERS = (
    "offsets q k v g beta A_log dt_bias initial_state kept kept_offsets o final_state "
    "d_o d_final_state dq dk dv dg dbeta dA_log d_dt_bias d_initial_state"
).split()


class _Struct(ctypes.Structure):
    """`kda_args` of kda_chunk.h, field for field."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTEGERS]
        + [(name, ctypes.c_float) for name in _FLOATS]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
    )


def unsuitable(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the native kernel cannot take tensors like these; None if it can."""
    if device.type != "cpu":
        return f"the native kernel runs on the CPU, not on {device.type}"
    other = [str(dtype) for dtype in dtypes if dtype not in TYPES]
    if other:
        return f"the native kernel takes float32 and bfloat16, not {other[0].removeprefix('torch.')}"
    return unavailable_reason("kda")


def native(args: Arguments) -> tuple[Tensor, Tensor | None]:
    """Run the C kernel. Returns `(o [B, T, HV, V] in q's dtype, final state in the caller's layout or None)`.

    Raises:
        CapacityError: the kernel's workspace did not fit into memory.
    """
    # torch.autograd.Function sees tensors only as positional arguments; the rest of `args` travels in the dataclass
    return _Native.apply(
        args.q, args.k, args.v, args.g, args.beta, args.A_log, args.dt_bias, args.initial_state, _Layout.of(args)
    )


def native_recurrent(args: Arguments) -> tuple[Tensor, Tensor | None]:
    """Run the C token loop, without gradients; results as `native`, bitwise the same however a sequence is split.

    Raises:
        CapacityError: the kernel's workspace did not fit into memory.
    """
    inputs = (args.q, args.k, args.v, args.g, args.beta)
    o, final, _ = _forward(
        "kda_recurrent", inputs, args.A_log, args.dt_bias, args.initial_state, _Layout.of(args), False
    )
    return o, final


@dataclass(frozen=True)
class _Layout:
    """The part of `Arguments` that is not tensors, with the offsets as tensors the C code can read."""

    offsets: Tensor
    kept_offsets: Tensor
    kept: int
    integers: dict[str, int]
    floats: dict[str, float]
    output_final_state: bool
    keep_states: bool  # asked here: inside an autograd function gradients are always off

    @staticmethod
    def of(args: Arguments) -> _Layout:
        segments = [-(-(end - begin) // SEGMENT) for begin, end in pairwise(args.offsets)]
        kept_offsets = [0]
        for count in segments:
            kept_offsets.append(kept_offsets[-1] + count)
        return _Layout(
            offsets=torch.tensor(args.offsets, dtype=torch.int64),
            kept_offsets=torch.tensor(kept_offsets, dtype=torch.int64),
            kept=kept_offsets[-1],
            integers={
                "sequences": args.sequences,
                "heads": args.heads,
                "qk_heads": args.q.shape[2],
                "key_dim": args.key_dim,
                "value_dim": args.value_dim,
                "l2_norm": args.l2_norm,
                "gate": args.gate,
                "bounded": args.lower_bound is not None,
                "beta_sigmoid": args.beta_sigmoid,
                "state_v_first": args.state_v_first,
            },
            floats={
                "scale": args.scale,
                "lower_bound": args.lower_bound or 0.0,
                "beta_scale": args.beta_scale,
            },
            output_final_state=args.output_final_state,
            keep_states=torch.is_grad_enabled(),
        )


def _rows(x: Tensor) -> Tensor:
    """`x` `[B, T, ...]` such that token b * T + t lies `stride(1)` numbers after the one before it."""
    inner = x.stride(-1) == 1 and (x.dim() == 3 or x.stride(2) == x.shape[3])
    rows = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if inner and rows else x.contiguous()


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _struct(layout: _Layout, tensors: dict[str, Tensor | None]) -> _Struct:
    q, g, beta = tensors["q"], tensors["g"], tensors["beta"]
    struct = _Struct(**layout.integers, **layout.floats)
    struct.threads = torch.get_num_threads()
    struct.type, struct.g_type, struct.beta_type = TYPES[q.dtype], TYPES[g.dtype], TYPES[beta.dtype]
    for name in ("q", "k", "v", "g", "beta"):
        setattr(struct, f"{name}_stride", tensors[name].stride(1))
    for name, tensor in tensors.items():
        setattr(struct, name, _pointer(tensor))
    struct.offsets, struct.kept_offsets = layout.offsets.data_ptr(), layout.kept_offsets.data_ptr()
    return struct


def _call(entry: str, struct: _Struct) -> None:
    library = load("kda")
    assert library is not None, "select() chose the native kernel without having it"
    if getattr(library, entry)(ctypes.byref(struct)):
        raise CapacityError(f"{entry} could not allocate its workspace; lower the thread count or free memory")


def _forward(
    entry: str,
    inputs: tuple[Tensor, ...],
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    layout: _Layout,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, final state, and with `keep` the states that the backward pass starts from."""
    q, k, v, g, beta = (_rows(x) for x in inputs)
    heads, key_dim, value_dim = (layout.integers[name] for name in ("heads", "key_dim", "value_dim"))
    o = torch.empty(v.shape, dtype=q.dtype)
    final, kept = None, None
    if layout.output_final_state:
        inner = (value_dim, key_dim) if layout.integers["state_v_first"] else (key_dim, value_dim)
        final = torch.empty(layout.integers["sequences"], heads, *inner)
    if keep:
        kept = torch.empty(layout.kept, heads, key_dim, value_dim)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": _float(A_log), "dt_bias": _float(dt_bias)}
    rest = {"initial_state": _float(initial_state), "kept": kept, "o": o, "final_state": final}
    _call(entry, _struct(layout, tensors | rest))
    return o, final, kept


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        layout: _Layout,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = tuple(_rows(x) for x in (q, k, v, g, beta))
        training = layout.keep_states and any(ctx.needs_input_grad)
        o, final, kept = _forward("kda_forward", inputs, A_log, dt_bias, initial_state, layout, training)
        ctx.save_for_backward(*inputs, A_log, dt_bias, kept)
        ctx.layout = layout
        ctx.dt_bias_shape = None if dt_bias is None else dt_bias.shape
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, A_log, dt_bias, kept = ctx.saved_tensors
        layout: _Layout = ctx.layout
        heads, qk_heads, key_dim = (layout.integers[name] for name in ("heads", "qk_heads", "key_dim"))
        tokens, sequences = q.shape[:2], layout.integers["sequences"]
        d_o = torch.zeros_like(v) if d_o is None else d_o.to(q.dtype).contiguous()
        grouped = heads != qk_heads  # then dq and dk of a group are summed here, and not in bfloat16
        dqk_dtype = torch.float32 if grouped else q.dtype
        dq, dk = (torch.empty(*tokens, heads, key_dim, dtype=dqk_dtype) for _ in range(2))
        dv, dg, dbeta = (torch.empty(x.shape, dtype=x.dtype) for x in (v, g, beta))
        dA = torch.empty(sequences, heads)
        dbias = torch.empty(sequences, heads, key_dim)
        d_entry = None
        if ctx.needs_input_grad[7]:
            inner = (v.shape[3], key_dim) if layout.integers["state_v_first"] else (key_dim, v.shape[3])
            d_entry = torch.empty(sequences, heads, *inner)
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": _float(A_log), "dt_bias": _float(dt_bias)}
        rest = {
            "kept": kept,
            "d_o": d_o,
            "d_final_state": _float(d_final_state),
            "dq": dq,
            "dk": dk,
            "dv": dv,
            "dg": dg,
            "dbeta": dbeta,
            "dA_log": dA,
            "d_dt_bias": dbias,
            "d_initial_state": d_entry,
        }
        struct = _struct(layout, tensors | rest)
        struct.dqk_type = TYPES[dqk_dtype]
        _call("kda_backward", struct)
        if grouped:
            dq, dk = (x.unflatten(2, (qk_heads, -1)).sum(3).to(q.dtype) for x in (dq, dk))
        dA_log = None if A_log is None else dA.sum(0).to(A_log.dtype)
        d_dt_bias = None if dt_bias is None else dbias.sum(0).reshape(ctx.dt_bias_shape).to(dt_bias.dtype)
        return dq, dk, dv, dg, dbeta, dA_log, d_dt_bias, d_entry, None
