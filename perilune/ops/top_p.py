"""The cut-off of top-p sampling: the smallest logit of a nucleus, the least set of most likely tokens that weighs enough.

A cut-off keeps or drops tied tokens together, and depends on its row alone. Nothing here makes the host wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.triton.available import choose

SHORTLISTS = (128, 2048)
"""Largest logits looked at before a row is sorted as a whole: a peaked model reaches its goal well within them. Whether it does
is a number that the host has to see, so it is done where that costs nothing: on a CPU."""


def select(logits_NZ: Tensor) -> Choice:
    """Which implementation takes these logits, and why."""
    return choose(logits_NZ) or Choice("torch", f"plain torch on {logits_NZ.device.type}: a short list, or a sort")


def top_p_cutoff(logits_NZ: Tensor, weights_NZ: Tensor, goal_N1: Tensor) -> Tensor:
    """Smallest logit of each row's nucleus, [N, 1]: all that reach it weigh at least the goal, all above it weigh less.

    Args:
        logits_NZ: fp32 or fp64; -inf for tokens that are out.
        weights_NZ: of the tokens, in the same dtype, not below 0, and larger for larger logits; they are added in fp64.
        goal_N1: fp64, above 0 and at most the weight of all.
    """
    if select(logits_NZ).implementation == "triton" and logits_NZ.dtype is torch.float32:
        from perilune.ops.triton.top_p import cutoff

        return cutoff(logits_NZ, weights_NZ, goal_N1)
    return by_lists(logits_NZ, weights_NZ, goal_N1, SHORTLISTS if logits_NZ.is_cpu else ())


def by_lists(logits_NZ: Tensor, weights_NZ: Tensor, goal_N1: Tensor, shortlists: tuple[int, ...]) -> Tensor:
    """The same in plain torch, by so many of the largest logits, one list after the other, and then by all of them."""
    vocab = logits_NZ.shape[-1]
    cutoff_N1 = torch.empty_like(logits_NZ[:, :1])
    left = None  # rows whose cut-off is not found yet; None = all
    for size in (size for size in shortlists if size < vocab):
        some = slice(None) if left is None else left
        value_NS, token_NS = logits_NZ[some].topk(size, dim=-1)
        short_N1 = _short_of_goal(weights_NZ[some].gather(-1, token_NS), goal_N1[some])
        found_N = short_N1[:, 0] < size
        left = torch.arange(len(logits_NZ)) if left is None else left
        cutoff_N1[left[found_N]] = value_NS.gather(-1, short_N1.clamp_max(size - 1))[found_N]
        left = left[~found_N]
        if not len(left):
            return cutoff_N1
    some = slice(None) if left is None else left
    value_NZ, token_NZ = logits_NZ[some].sort(-1, descending=True)
    short_N1 = _short_of_goal(weights_NZ[some].gather(-1, token_NZ), goal_N1[some])
    cutoff_N1[some] = value_NZ.gather(-1, short_N1.clamp_max(vocab - 1))
    return cutoff_N1


def _short_of_goal(weights_NS: Tensor, goal_N1: Tensor) -> Tensor:
    """Tokens before the one that reaches the goal, [N, 1]; the heaviest come first."""
    return (weights_NS.cumsum(-1, dtype=torch.float64) < goal_N1).sum(-1, keepdim=True)
