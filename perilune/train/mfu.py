"""Model FLOPs utilisation: the mathematics' FLOPs a second over what this machine's matrix product reaches.

The peak is measured, not looked up: the best of a few large products in the run's dtype on the run's device and threads.
So 100 % would mean that a training step costs no more than its matrix products at their best speed.
"""

from __future__ import annotations

import time

import torch

from perilune.config.model import ModelConfig
from perilune.shapes.flops import train_flops_per_token


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, *, budget: float = 0.3) -> float:
    """FLOP/s of the fastest of several square products.

    Args:
        device: where.
        dtype: of the operands.
        budget: seconds spent measuring.
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def mfu(model: ModelConfig, seq_len: int, tokens_per_second: float, peak: float) -> float:
    """Fraction of `peak` (FLOP/s) that training at `tokens_per_second` in windows of `seq_len` tokens makes use of."""
    return train_flops_per_token(model, seq_len) * tokens_per_second / peak
