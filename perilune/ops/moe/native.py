"""Calls into the C kernels of mixture of experts (`ops/native/moe.c`): checks, outputs and pointers, no mathematics."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.ops.native.blas import sgemm_address, why_not_plain
from perilune.ops.native.build import load, unavailable_reason

_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
_SIGNATURES = {
    "route": (_I, (_P, _P, _L, _L, _I, _I, _F, _P, _P, _P, _P, _I)),
    "route_backward": (None, (_P, _P, _P, _L, _L, _I, _I, _F, _P, _I)),
    "histogram_add": (None, (_P, _P, _P, _P, _L, _L, _L, _F, _F, _I)),
    "plan": (None, (_P, _L, _L, _P, _P, _P)),
    "experts_forward": (_I, (*[_P] * 9, _L, _L, _I, _L, _L, _F, _F, _I, _I, _P, _P, _I)),
    "experts_backward": (_I, (*[_P] * 10, _L, _L, _I, _L, _L, _F, _F, _I, _I, *[_P] * 6, _I)),
    "experts_decode": (_I, (*[_P] * 6, _L, _I, _L, _L, _F, _F, _I, _I, _P, _I)),
    "moe_decode": (_I, (*[_P] * 6, _L, _L, _I, _L, _L, _I, _F, _F, _F, _I, _I, _P, _I)),
}

_library: ctypes.CDLL | None = None


def why_not(*tensors: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return why the C kernels cannot take these tensors, or None if they can."""
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            return f"the C kernels take {', '.join(str(d)[6:] for d in dtypes)}, the input is {str(tensor.dtype)[6:]}"
    return why_not_plain(*tensors) or unavailable_reason("moe")


def library() -> ctypes.CDLL:
    """Return the loaded kernels, with their C signatures declared. Call only where `why_not` returned None."""
    global _library
    if _library is None:
        loaded = load("moe")
        assert loaded is not None, "the C kernels were chosen but are not available"
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        _library = loaded
    return _library


def route(
    logits_NE: Tensor, bias_E: Tensor, k: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (index_NA int64, weight_NA, scores_NE, cutoff_N) as `router.route` defines them; fp32."""
    logits_NE, bias_E = logits_NE.contiguous(), bias_E.contiguous()
    tokens, experts = logits_NE.shape
    scores_NE = torch.empty_like(logits_NE)
    index_NA = torch.empty(tokens, k, dtype=torch.int64)
    weight_NA = torch.empty(tokens, k)
    cutoff_N = torch.empty(tokens)
    failed = library().route(
        logits_NE.data_ptr(), bias_E.data_ptr(), tokens, experts, k, renormalize, scaling_factor,
        scores_NE.data_ptr(), index_NA.data_ptr(), weight_NA.data_ptr(), cutoff_N.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for the router's scratch space")
    return index_NA, weight_NA, scores_NE, cutoff_N


def route_backward(
    scores_NE: Tensor, index_NA: Tensor, dweight_NA: Tensor, renormalize: bool, scaling_factor: float
) -> Tensor:
    """Return dlogits_NE given the gradient of the weights; fp32."""
    dweight_NA = dweight_NA.contiguous()
    dlogits_NE = torch.empty_like(scores_NE)
    library().route_backward(
        scores_NE.data_ptr(), index_NA.data_ptr(), dweight_NA.data_ptr(), *scores_NE.shape, index_NA.shape[1],
        renormalize, scaling_factor, dlogits_NE.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return dlogits_NE


def histogram_add(
    count_EB: Tensor, scores_NE: Tensor, cutoff_N: Tensor, valid_N: Tensor | None, low: float, inverse_width: float
) -> None:
    """Add the required biases of the valid tokens to the int32 histogram `count_EB`, in place."""
    scores_NE, cutoff_N = scores_NE.contiguous(), cutoff_N.contiguous()
    assert count_EB.is_contiguous() and count_EB.dtype == torch.int32, "the histogram must be contiguous int32"
    if valid_N is not None:
        valid_N = valid_N.contiguous()
        assert valid_N.dtype == torch.bool, f"valid mask of {valid_N.dtype}, expected bool"
    library().histogram_add(
        count_EB.data_ptr(), scores_NE.data_ptr(), cutoff_N.data_ptr(), None if valid_N is None else valid_N.data_ptr(),
        *scores_NE.shape, count_EB.shape[1], low, inverse_width, torch.get_num_threads(),
    )  # fmt: skip


def plan(index_NA: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (offset_E1, slot_R, place_R) int64, as `plan.DispatchPlan` defines them."""
    index_NA = index_NA.contiguous()
    rows = index_NA.numel()
    offset_E1 = torch.empty(num_experts + 1, dtype=torch.int64)
    slot_R, place_R = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    library().plan(
        index_NA.data_ptr(), rows, num_experts, offset_E1.data_ptr(), slot_R.data_ptr(), place_R.data_ptr()
    )  # fmt: skip
    return offset_E1, slot_R, place_R


def _caps(caps: tuple[float, float | None] | None) -> tuple[float, float]:
    """(beta, linear_beta) as the C code takes them: 0 = uncapped, so (0, 0) is SwiGLU."""
    return (0.0, 0.0) if caps is None else (caps[0], caps[1] or 0.0)


def _half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _weights(*weights: Tensor) -> tuple[Tensor, ...]:
    """The weight stacks, contiguous and of one dtype."""
    kind = weights[0].dtype
    assert all(w.dtype is kind for w in weights), f"expert weights of dtypes {[w.dtype for w in weights]}"
    return tuple(w.contiguous() for w in weights)


def _checked(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the experts' working space")


def experts_forward(
    z_NL: Tensor,
    weight_NA: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    plan: tuple[Tensor, Tensor, Tensor],
    caps: tuple[float, float | None] | None,
) -> Tensor:
    """Return out_NL; see `experts.routed_experts`."""
    z_NL, weight_NA = z_NL.contiguous(), weight_NA.float().contiguous()
    w1_EFL, w3_EFL, w2_ELF = _weights(w1_EFL, w3_EFL, w2_ELF)
    experts, hidden, width = w1_EFL.shape
    tokens, active = weight_NA.shape
    y_RL, out_NL = torch.empty(tokens * active, width), torch.empty_like(z_NL)
    _checked(library().experts_forward(
        sgemm_address(), z_NL.data_ptr(), weight_NA.data_ptr(), w1_EFL.data_ptr(), w3_EFL.data_ptr(), w2_ELF.data_ptr(),
        *(part.data_ptr() for part in plan), tokens, experts, active, width, hidden, *_caps(caps), _half(z_NL),
        _half(w1_EFL), y_RL.data_ptr(), out_NL.data_ptr(), torch.get_num_threads(),
    ))  # fmt: skip
    return out_NL


def experts_backward(
    z_NL: Tensor,
    weight_NA: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    plan: tuple[Tensor, Tensor, Tensor],
    caps: tuple[float, float | None] | None,
    dout_NL: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dz, dweight, dw1, dw3, dw2), each in its own tensor's dtype."""
    z_NL, p_NA, dout_NL = z_NL.contiguous(), weight_NA.float().contiguous(), dout_NL.contiguous()
    w1_EFL, w3_EFL, w2_ELF = _weights(w1_EFL, w3_EFL, w2_ELF)
    experts, hidden, width = w1_EFL.shape
    tokens, active = p_NA.shape
    dx_RL, dz_NL, dp_NA = torch.empty(tokens * active, width), torch.empty_like(z_NL), torch.empty_like(p_NA)
    dw1_EFL, dw3_EFL, dw2_ELF = (torch.empty(w.shape) for w in (w1_EFL, w3_EFL, w2_ELF))
    _checked(library().experts_backward(
        sgemm_address(), z_NL.data_ptr(), p_NA.data_ptr(), w1_EFL.data_ptr(), w3_EFL.data_ptr(), w2_ELF.data_ptr(),
        *(part.data_ptr() for part in plan), dout_NL.data_ptr(), tokens, experts, active, width, hidden, *_caps(caps),
        _half(z_NL), _half(w1_EFL), dx_RL.data_ptr(), dz_NL.data_ptr(), dp_NA.data_ptr(), dw1_EFL.data_ptr(),
        dw3_EFL.data_ptr(), dw2_ELF.data_ptr(), torch.get_num_threads(),
    ))  # fmt: skip
    kind = w1_EFL.dtype
    return dz_NL, dp_NA.to(weight_NA.dtype), dw1_EFL.to(kind), dw3_EFL.to(kind), dw2_ELF.to(kind)


def experts_decode(
    z_NL: Tensor,
    index_NA: Tensor,
    weight_NA: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    caps: tuple[float, float | None] | None,
) -> Tensor:
    """Return out_NL for a few tokens; see `decode.experts_decode`."""
    z_NL, index_NA, weight_NA = z_NL.contiguous(), index_NA.contiguous(), weight_NA.float().contiguous()
    w1_EFL, w3_EFL, w2_ELF = _weights(w1_EFL, w3_EFL, w2_ELF)
    out_NL = torch.empty_like(z_NL)
    _checked(library().experts_decode(
        z_NL.data_ptr(), index_NA.data_ptr(), weight_NA.data_ptr(), w1_EFL.data_ptr(), w3_EFL.data_ptr(),
        w2_ELF.data_ptr(), *index_NA.shape, w1_EFL.shape[2], w1_EFL.shape[1], *_caps(caps), _half(z_NL), _half(w1_EFL),
        out_NL.data_ptr(), torch.get_num_threads(),
    ))  # fmt: skip
    return out_NL


# A gated MLP is the first expert of one, with the weight 1, for each of up to 8 tokens.
_FIRST, _WHOLE = torch.zeros(8, dtype=torch.int64), torch.ones(8)


def mlp_decode(
    x_ND: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, caps: tuple[float, float | None] | None
) -> Tensor:
    """Return out_ND for a few tokens; see `decode.mlp_decode`."""
    x_ND = x_ND.contiguous()
    gate_FD, up_FD, down_DF = _weights(gate_FD, up_FD, down_DF)
    assert x_ND.shape[0] <= len(_FIRST), f"{x_ND.shape[0]} tokens are not a few"
    out_ND = torch.empty_like(x_ND)
    _checked(library().experts_decode(
        x_ND.data_ptr(), _FIRST.data_ptr(), _WHOLE.data_ptr(), gate_FD.data_ptr(), up_FD.data_ptr(), down_DF.data_ptr(),
        x_ND.shape[0], 1, gate_FD.shape[1], gate_FD.shape[0], *_caps(caps), _half(x_ND), _half(gate_FD), out_ND.data_ptr(),
        torch.get_num_threads(),
    ))  # fmt: skip
    return out_ND


def moe_decode(
    logits_NE: Tensor,
    bias_E: Tensor,
    z_NL: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    k: int,
    caps: tuple[float, float | None] | None,
    renormalize: bool,
    scaling_factor: float,
) -> Tensor:
    """Return out_NL for a few tokens, routing included; see `decode.moe_decode`."""
    logits_NE, bias_E, z_NL = logits_NE.float().contiguous(), bias_E.float().contiguous(), z_NL.contiguous()
    w1_EFL, w3_EFL, w2_ELF = _weights(w1_EFL, w3_EFL, w2_ELF)
    experts, hidden, width = w1_EFL.shape
    out_NL = torch.empty_like(z_NL)
    _checked(library().moe_decode(
        logits_NE.data_ptr(), bias_E.data_ptr(), z_NL.data_ptr(), w1_EFL.data_ptr(), w3_EFL.data_ptr(),
        w2_ELF.data_ptr(), z_NL.shape[0], experts, k, width, hidden, renormalize, scaling_factor, *_caps(caps),
        _half(z_NL), _half(w1_EFL), out_NL.data_ptr(), torch.get_num_threads(),
    ))  # fmt: skip
    return out_NL
