"""Calls into the C kernels of mixture of experts (`ops/native/moe.c`): checks, outputs and pointers, no mathematics."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.ops.native.build import load, unavailable_reason

_P, _L, _I, _F = c_void_p, c_int64, c_int, c_float
_SIGNATURES = {
    "route": (_I, (_P, _P, _L, _L, _I, _I, _F, _P, _P, _P, _P, _I)),
    "route_backward": (None, (_P, _P, _P, _L, _L, _I, _I, _F, _P, _I)),
    "histogram_add": (None, (_P, _P, _P, _P, _L, _L, _L, _F, _F, _I)),
    "plan": (None, (_P, _L, _L, _I, _P, _P, _P)),
}

_library: ctypes.CDLL | None = None


def why_not(*tensors: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return why the C kernels cannot take these tensors, or None if they can."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"the C kernels run on CPU, the input is on {tensor.device.type}"
        if tensor.dtype not in dtypes:
            return f"the C kernels take {', '.join(str(d)[6:] for d in dtypes)}, the input is {str(tensor.dtype)[6:]}"
    return unavailable_reason("moe")


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
    """Return (offset [E+1], token [N*A], place [N*A]) int64; see `plan.dispatch_plan`."""
    index_NA = index_NA.contiguous()
    rows = index_NA.numel()
    offset_E1 = torch.empty(num_experts + 1, dtype=torch.int64)
    token_R, place_R = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    library().plan(
        index_NA.data_ptr(), rows, num_experts, index_NA.shape[1],
        offset_E1.data_ptr(), token_R.data_ptr(), place_R.data_ptr(),
    )  # fmt: skip
    return offset_E1, token_R, place_R
