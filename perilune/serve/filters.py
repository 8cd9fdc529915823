"""What may be drawn, and the draw itself: temperature, top-k, top-p, min-p, and a number looked up in what is left.

Filters are cut-off values: every token that reaches a cut-off is kept, so tied tokens stay or go together, and rows do not
depend on each other. On a GPU nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.ops.top_p import top_p_cutoff
from perilune.serve.request import SamplingParams
from perilune.serve.staging import to_device


def kept_weights(logits_NZ: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities after temperature and filters, 0 for a dropped token: [N, Z], the largest is 1.

    Args:
        logits_NZ: fp32 or fp64, finite maxima.
        params: one a row, temperature > 0.
    """
    vocab, device = logits_NZ.shape[-1], logits_NZ.device
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    numbers = [(1.0 / max(p.temperature, 1e-6), p.top_p, p.min_p) for p in params]
    scale_N1, top_p_N1, min_p_N1 = to_device(numbers, device, torch.float64).T[:, :, None].unbind()
    scale_N1 = scale_N1.to(logits_NZ.dtype)
    weights_NZ = torch.exp((logits_NZ - logits_NZ.amax(-1, keepdim=True)) * scale_N1)
    limited = [row for row, k in enumerate(ks) if k < vocab]
    if limited:
        index = to_device(limited, device)
        largest = logits_NZ[index].topk(max(ks[row] for row in limited), dim=-1).values
        kth = to_device([ks[row] - 1 for row in limited], device)[:, None]
        dropped_NZ = logits_NZ < _cutoff(logits_NZ, index, largest.gather(-1, kth))
        logits_NZ = logits_NZ.masked_fill(dropped_NZ, -math.inf)
        weights_NZ = weights_NZ.masked_fill(dropped_NZ, 0.0)
    nucleus = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if nucleus:
        index = to_device(nucleus, device)
        some_NZ = weights_NZ[index]
        goal_N1 = some_NZ.cumsum(-1, dtype=torch.float64)[:, -1:] * top_p_N1[index]
        least_N1 = top_p_cutoff(logits_NZ[index], some_NZ, goal_N1)
        weights_NZ = weights_NZ.masked_fill(logits_NZ < _cutoff(logits_NZ, index, least_N1), 0.0)
    if any(p.min_p > 0.0 for p in params):
        weights_NZ = weights_NZ.masked_fill(weights_NZ < min_p_N1.to(weights_NZ.dtype), 0.0)
    return weights_NZ


def _cutoff(logits_NZ: Tensor, index: Tensor, values_I1: Tensor) -> Tensor:
    """Cut-offs of some rows, [N, 1]; the others keep everything."""
    return torch.full_like(logits_NZ[:, :1], -math.inf).index_copy_(0, index, values_I1)


def pick(weights_NZ: Tensor, numbers_N: NDArray) -> Tensor:
    """The token at each number of [0, 1) in its row's cumulative distribution, in id order: int64 [N].

    A row without a distribution, for its weights are not finite, gives some token: the next step may embed it before
    anybody has looked, and on a GPU an id that is none would end the engine.
    """
    mass_NZ = weights_NZ.cumsum(-1, dtype=torch.float64)
    goal_N1 = to_device(numbers_N, mass_NZ.device)[:, None] * mass_NZ[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the goal, hence never one of mass zero
    return torch.searchsorted(mass_NZ, goal_N1, right=True)[:, 0].clamp_(max=mass_NZ.shape[-1] - 1)
