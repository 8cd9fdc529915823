"""Routed experts of a few tokens on MXFP4 weights as three CUDA kernels, without a plan.

Each (token, expert) pair reads its expert's matrices, so nothing is sorted or counted, and a token's bits do not depend on
its company. Pairs that share an expert read it once each: worth it while there are few pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.mx.cuda.hidden import hidden
from perilune.ops.mx.cuda.hidden import kernel as hidden_kernel
from perilune.ops.mx.cuda.output import kernel as output_kernel
from perilune.ops.mx.cuda.output import output, sum_kernel
from perilune.ops.mx.fake_quant import fake_quantize
from perilune.ops.mx.pack import DeviceWeight

EXPERTS_A_PAIR = 4  # experts for every pair: fewer, and a plan that reads each expert once is faster


def why_not(z_NL: Tensor, index_NA: Tensor, experts: int) -> str | None:
    """Why the kernels do not take these tokens; None if they do."""
    if z_NL.dtype != torch.bfloat16:
        return f"the CUDA kernels multiply bfloat16, not {str(z_NL.dtype).removeprefix('torch.')}"
    if index_NA.numel() * EXPERTS_A_PAIR > experts:
        return f"{index_NA.numel()} pairs share {experts} experts, and a plan reads each expert once"
    for kernel in (hidden_kernel(True, True), output_kernel(), sum_kernel()):
        if (reason := kernel.unavailable_reason(z_NL.device)) is not None:
            return reason
    return None


def experts(
    z_NL: Tensor, index_NA: Tensor, weight_NA: Tensor, w1: DeviceWeight, w3: DeviceWeight, w2: DeviceWeight,
    caps: tuple[float, float | None] | None, hidden_rule: str | None = None,
) -> Tensor:  # fmt: skip
    """`triton_experts.experts` for few pairs; the same arguments."""
    if z_NL.stride(1) != 1 or z_NL.stride(0) % 8 or z_NL.data_ptr() % 16:  # rows are read 16 bytes at a time
        z_NL = z_NL.clone(memory_format=torch.contiguous_format)
    index_NA = index_NA.contiguous()
    h_PF = hidden(z_NL, index_NA, w1, w3, caps)
    if hidden_rule is not None:
        h_PF = fake_quantize(h_PF, "mxfp8", hidden_rule)
    return output(h_PF, index_NA, weight_NA, w2)
