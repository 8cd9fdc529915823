"""From logits to token ids: a grammar, temperature, top-k, top-p, min-p, one random stream a request.

The order is: what the grammar allows, temperature, top-k, top-p of what top-k left, min-p. Each filter is a cut-off value, and every token that
reaches the cut-off is kept, so tied tokens stay or go together and the result depends neither on how a sort orders
ties nor on the other rows of the batch. A draw is one uniform number of the request's own CPU generator, looked up in
the cumulative distribution in id order; the same seed gives the same tokens on every device and in every batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.errors import CheckpointError
from perilune.serve.request import SamplingParams

_SHORTLIST = 128
"""Largest logits looked at before the whole vocabulary is sorted: a peaked model reaches top_p well within them."""


def _top_p_cutoff(logits_NZ: Tensor, weights_NZ: Tensor, scale: float, top_p: float) -> Tensor:
    """Smallest logit of the nucleus, [N, 1].

    Masses are fp64 sums, in a fixed order, of the fp32 weights exp((l - max) * scale).
    """
    vocab = logits_NZ.shape[-1]
    goal_N1 = weights_NZ.cumsum(-1, dtype=torch.float64)[:, -1:] * top_p
    for size in (min(_SHORTLIST, vocab), vocab):
        value_NS = logits_NZ.topk(size, dim=-1).values if size < vocab else logits_NZ.sort(-1, descending=True).values
        mass_NS = torch.exp((value_NS - value_NS[:, :1]) * scale).cumsum(-1, dtype=torch.float64)
        short_N1 = (mass_NS < goal_N1).sum(-1, keepdim=True)  # tokens before the one that reaches the goal
        if size == vocab or int(short_N1.max()) < size:
            break
    return value_NS.gather(-1, short_N1.clamp_max(size - 1))


def kept_weights(logits_NZ: Tensor, params: SamplingParams) -> Tensor:
    """Unnormalised probabilities after all filters, 0 for a dropped token: fp32 [N, Z], the largest is 1.

    Args:
        logits_NZ: finite maxima; fp32 is used inside.
        params: temperature > 0 and the filters, the same for all rows.
    """
    logits_NZ = logits_NZ.float()
    scale = 1.0 / max(params.temperature, 1e-6)
    weights_NZ = torch.exp((logits_NZ - logits_NZ.amax(-1, keepdim=True)) * scale)
    if 0 < params.top_k < logits_NZ.shape[-1]:
        dropped_NZ = logits_NZ < logits_NZ.topk(params.top_k, dim=-1).values[:, -1:]
        logits_NZ = logits_NZ.masked_fill(dropped_NZ, -math.inf)
        weights_NZ = weights_NZ.masked_fill(dropped_NZ, 0.0)
    if params.top_p < 1.0:
        cutoff_N1 = _top_p_cutoff(logits_NZ, weights_NZ, scale, params.top_p)
        weights_NZ = weights_NZ.masked_fill(logits_NZ < cutoff_N1, 0.0)
    if params.min_p > 0.0:
        weights_NZ = weights_NZ.masked_fill(weights_NZ < params.min_p, 0.0)
    return weights_NZ


def allowed_only(logits_BZ: Tensor, masks: Sequence[NDArray[np.bool_] | None]) -> Tensor:
    """Logits with -inf for every token that a row's mask `[Z]` forbids; rows without a mask stay as they are."""
    if all(mask is None for mask in masks):
        return logits_BZ
    every = np.ones(logits_BZ.shape[-1], dtype=np.bool_)
    allowed_BZ = torch.from_numpy(np.stack([every if mask is None else mask for mask in masks]))
    return logits_BZ.masked_fill(~allowed_BZ.to(logits_BZ.device), -math.inf)


class Sampler:
    """Draws the next token of every row of a batch.

    Args:
        params: one a row.
        stream: number added to a row's seed, one a row, so that several answers to one request differ; default 0.
    """

    def __init__(self, params: Sequence[SamplingParams], stream: Sequence[int] | None = None) -> None:
        self._params = list(params)
        self._generators: list[torch.Generator | None] = []
        for row, param in enumerate(self._params):
            generator = None
            if not param.greedy:
                generator = torch.Generator()
                if param.seed is None:
                    generator.seed()
                else:
                    generator.manual_seed((param.seed + (stream[row] if stream else 0)) % 2**63)
            self._generators.append(generator)
        self._group()

    def _group(self) -> None:
        """Rows that share their filters are drawn together."""
        groups: dict[tuple[float, int, float, float], list[int]] = {}
        for row, param in enumerate(self._params):
            if not param.greedy:
                groups.setdefault((param.temperature, param.top_k, param.top_p, param.min_p), []).append(row)
        self._groups = [(self._params[rows[0]], rows) for rows in groups.values()]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch only, in this order; each keeps its random stream."""
        self._params = [self._params[row] for row in rows]
        self._generators = [self._generators[row] for row in rows]
        self._group()

    @torch.inference_mode()
    def draw(self, logits_BZ: Tensor) -> list[int]:
        """Next token id of every row.

        Args:
            logits_BZ: one row a request, any float dtype.
        Raises:
            CheckpointError: a row's largest logit is not finite; sampling from it would be meaningless.
        """
        largest_B, index_B = logits_BZ.max(-1)
        largest, ids = largest_B.tolist(), index_B.tolist()
        for row, value in enumerate(largest):
            if not math.isfinite(value):
                raise CheckpointError(
                    f"the model returned {value} logits (row {row}), so no token can be drawn: the weights have "
                    "diverged or are damaged; use an earlier checkpoint"
                )
        for params, rows in self._groups:
            whole = len(rows) == logits_BZ.shape[0]
            weights_NZ = kept_weights(logits_BZ if whole else logits_BZ[rows], params)
            mass_NZ = weights_NZ.cumsum(-1, dtype=torch.float64)
            draws = [torch.rand((), generator=self._generators[row], dtype=torch.float64) for row in rows]
            goal_N1 = torch.stack(draws)[:, None].to(mass_NZ.device) * mass_NZ[:, -1:]
            # right=True: the first token whose cumulative mass exceeds the goal, hence never one of mass zero
            for row, token_id in zip(rows, torch.searchsorted(mass_NZ, goal_N1, right=True)[:, 0].tolist()):
                ids[row] = token_id
        return ids
