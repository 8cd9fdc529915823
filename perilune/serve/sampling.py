"""From logits to token ids: what is forbidden, bias, penalties, temperature, top-k, top-p, min-p, one draw a row.

A batch is whatever rows a step happens to have: `draw_rows` takes them together, and each row's tokens are those that it
would draw alone. For that, filters are cut-off values (every token that reaches the cut-off is kept, so tied tokens stay
or go together), and a random number is a function of (seed, stream, place in the answer) and of nothing else: not of the
batch, the device, or an interruption. One uniform number is looked up in the cumulative distribution in id order.

Log-probabilities are those of the model, before everything that this file changes: they are what a trainer computes for
the same tokens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.errors import CheckpointError
from perilune.serve.penalties import TokenCounts, add_biases, penalised
from perilune.serve.request import SamplingParams, TokenLogprob

_SHORTLISTS = (128, 2048)
"""Largest logits looked at before a row is sorted as a whole: a peaked model reaches top_p well within them."""

Mask = NDArray[np.bool_]
"""[Z]: which tokens may come next."""


class Drawn(NamedTuple):
    """A drawn token; `logprob` if its request asked for it."""

    token_id: int
    logprob: TokenLogprob | None


class SamplingRow:
    """What drawing one answer needs to remember.

    Args:
        params: of its request.
        prompt: tokens of the prompt; the repetition penalty counts them. Ids below zero (images) are skipped.
        stream: which answer to the request this is; each has random numbers of its own.
        ends: tokens that end a document or a message.

    Attributes:
        drawn: tokens drawn so far.
        counts: of the tokens seen; None without penalties.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int] = (), *, stream: int = 0, ends: Collection[int] = ()
    ) -> None:
        self.params = params
        self.stream = stream
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.ends = frozenset(ends)
        self.drawn = 0
        self.counts = TokenCounts(prompt) if params.penalised else None

    def ended(self, token_id: int) -> bool:
        """Whether the answer ends at this token."""
        return token_id in self.ends or token_id in self.params.stop_ids

    @property
    def forbidden(self) -> set[int]:
        """Tokens that must not come next."""
        ids: set[int] = set()
        if self.params.ignore_eos:
            ids |= self.ends
        if self.drawn < self.params.min_tokens:
            ids |= self.ends | set(self.params.stop_ids)
        return ids

    def take(self, token_id: int) -> None:
        """Note a token of the answer: `draw_rows` does it for what it draws."""
        self.drawn += 1
        if self.counts is not None:
            self.counts.add(token_id)


@torch.inference_mode()
def draw_rows(
    rows: Sequence[SamplingRow], logits_BZ: Tensor, masks: Sequence[Mask | None] | None = None
) -> list[Drawn]:
    """Next token of every row; the rows take note of it.

    Args:
        rows: one a row of the logits, in any order and company.
        logits_BZ: any float dtype; fp32 is used inside, fp64 stays.
        masks: what a row's grammar allows; None = everything.

    Raises:
        CheckpointError: a row's largest logit is not finite; sampling from it would be meaningless.
    """
    logits_BZ = logits_BZ if logits_BZ.dtype == torch.float64 else logits_BZ.float()
    scores_BZ = adjusted(rows, logits_BZ, masks)
    largest_B, index_B = scores_BZ.max(-1)
    _check_finite(largest_B.tolist())
    ids = index_B.tolist()
    random = [index for index, row in enumerate(rows) if not row.params.greedy]
    if random:
        some_NZ = scores_BZ if len(random) == len(rows) else scores_BZ[random]
        weights_NZ = kept_weights(some_NZ, [rows[index].params for index in random])
        numbers_N = uniforms([(rows[i].seed, rows[i].stream, rows[i].drawn) for i in random])
        for index, token_id in zip(random, pick(weights_NZ, numbers_N), strict=True):
            ids[index] = token_id
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    logprobs: dict[int, TokenLogprob] = {}
    if asked:
        tops = [rows[index].params.logprobs or 0 for index in asked]
        logprobs = dict(zip(asked, token_logprobs(logits_BZ[asked], [ids[index] for index in asked], tops)))
    for row, token_id in zip(rows, ids, strict=True):
        row.take(token_id)
    return [Drawn(token_id, logprobs.get(index)) for index, token_id in enumerate(ids)]


def _check_finite(largest: Sequence[float]) -> None:
    for row, value in enumerate(largest):
        if not math.isfinite(value):
            raise CheckpointError(
                f"the model returned {value} logits (row {row}), so no token can be drawn: the weights have "
                "diverged or are damaged; use an earlier checkpoint"
            )


def adjusted(rows: Sequence[SamplingRow], logits_BZ: Tensor, masks: Sequence[Mask | None] | None = None) -> Tensor:
    """Logits after grammar, forbidden tokens, bias and penalties; the given ones if there is none of these."""
    masks = [None] * len(rows) if masks is None else masks
    allowed = [_allowed(row, mask, logits_BZ.shape[-1]) for row, mask in zip(rows, masks, strict=True)]
    scores_BZ = add_biases([row.params.logit_bias for row in rows], logits_BZ)
    scores_BZ = penalised([(row.params, row.counts) for row in rows], scores_BZ)
    return allowed_only(scores_BZ, allowed)


def _allowed(row: SamplingRow, mask: Mask | None, vocab: int) -> Mask | None:
    """What a row may draw. A grammar that allows nothing but forbidden tokens has the last word."""
    forbidden = row.forbidden
    if not forbidden:
        return mask
    left = np.ones(vocab, dtype=np.bool_) if mask is None else mask.copy()
    left[[token_id for token_id in forbidden if token_id < vocab]] = False
    return left if left.any() else mask


def allowed_only(logits_BZ: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """Logits with -inf for every token that a row's mask forbids; rows without a mask stay as they are."""
    if all(mask is None for mask in masks):
        return logits_BZ
    every = np.ones(logits_BZ.shape[-1], dtype=np.bool_)
    allowed_BZ = torch.from_numpy(np.stack([every if mask is None else mask for mask in masks]))
    return logits_BZ.masked_fill(~allowed_BZ.to(logits_BZ.device), -math.inf)


def kept_weights(logits_NZ: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities after temperature and filters, 0 for a dropped token: [N, Z], the largest is 1.

    Args:
        logits_NZ: fp32 or fp64, finite maxima.
        params: one a row, temperature > 0.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=logits_NZ.dtype, device=logits_NZ.device)[:, None]

    vocab = logits_NZ.shape[-1]
    scale_N1 = column([1.0 / max(p.temperature, 1e-6) for p in params])
    weights_NZ = torch.exp((logits_NZ - logits_NZ.amax(-1, keepdim=True)) * scale_N1)
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    limited = [row for row, k in enumerate(ks) if k < vocab]
    if limited:
        kth = torch.tensor([ks[row] - 1 for row in limited], device=logits_NZ.device)[:, None]
        cutoff_N1 = column([-math.inf] * len(params))
        largest = logits_NZ[limited].topk(max(ks[row] for row in limited), dim=-1).values
        cutoff_N1[limited] = largest.gather(-1, kth)
        dropped_NZ = logits_NZ < cutoff_N1
        logits_NZ = logits_NZ.masked_fill(dropped_NZ, -math.inf)
        weights_NZ = weights_NZ.masked_fill(dropped_NZ, 0.0)
    nucleus = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if nucleus:
        top_p_N1 = torch.tensor([params[row].top_p for row in nucleus], dtype=torch.float64)[:, None]
        cutoff_N1 = column([-math.inf] * len(params))
        cutoff_N1[nucleus] = _top_p_cutoff(logits_NZ[nucleus], weights_NZ[nucleus], scale_N1[nucleus], top_p_N1)
        weights_NZ = weights_NZ.masked_fill(logits_NZ < cutoff_N1, 0.0)
    if any(p.min_p > 0.0 for p in params):
        weights_NZ = weights_NZ.masked_fill(weights_NZ < column([p.min_p for p in params]), 0.0)
    return weights_NZ


def _top_p_cutoff(logits_NZ: Tensor, weights_NZ: Tensor, scale_N1: Tensor, top_p_N1: Tensor) -> Tensor:
    """Smallest logit of the nucleus, [N, 1].

    Masses are fp64 sums, in a fixed order, of the weights exp((l - max) * scale).
    """
    vocab = logits_NZ.shape[-1]
    goal_N1 = weights_NZ.cumsum(-1, dtype=torch.float64)[:, -1:] * top_p_N1.to(logits_NZ.device)
    cutoff_N1 = torch.empty_like(logits_NZ[:, :1])
    left = torch.arange(len(logits_NZ), device=logits_NZ.device)  # rows whose cut-off is not found yet
    for size in (*(size for size in _SHORTLISTS if size < vocab), vocab):
        some_NZ = logits_NZ[left]
        value_NS = some_NZ.topk(size, dim=-1).values if size < vocab else some_NZ.sort(-1, descending=True).values
        mass_NS = torch.exp((value_NS - value_NS[:, :1]) * scale_N1[left]).cumsum(-1, dtype=torch.float64)
        short_N = (mass_NS < goal_N1[left]).sum(-1)  # tokens before the one that reaches the goal
        found_N = (short_N < size) | (size == vocab)
        cutoff_N1[left[found_N]] = value_NS.gather(-1, short_N[:, None].clamp_max(size - 1))[found_N]
        left = left[~found_N]
        if not len(left):
            break
    return cutoff_N1


def pick(weights_NZ: Tensor, numbers_N: NDArray[np.float64]) -> list[int]:
    """The token at each number of [0, 1) in its row's cumulative distribution, in id order."""
    mass_NZ = weights_NZ.cumsum(-1, dtype=torch.float64)
    goal_N1 = torch.from_numpy(numbers_N).to(mass_NZ.device)[:, None] * mass_NZ[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the goal, hence never one of mass zero
    return torch.searchsorted(mass_NZ, goal_N1, right=True)[:, 0].tolist()


def uniforms(places: Sequence[tuple[int, int, int]]) -> NDArray[np.float64]:
    """A random number in [0, 1) for each (seed, stream, position): the same place has the same number everywhere.

    Two rounds of the SplitMix64 mixer (Steele, Lea and Flood 2014): one makes a key of seed and stream, one mixes the
    position into it.
    """
    seed, stream, position = np.array(places, dtype=np.uint64).reshape(-1, 3).T
    with np.errstate(over="ignore"):
        key = _mix64(_mix64(seed + _GOLDEN) + (stream + np.uint64(1)) * _GOLDEN)
        bits = _mix64(key + (position + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def token_logprobs(logits_NZ: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of one token a row, with the `tops[row]` most likely ones (lowest id first among equals).

    Also serves prompts: the logits behind tokens 0..T-2 and the ids 1..T-1.
    """
    scores_NZ = logits_NZ if logits_NZ.dtype == torch.float64 else logits_NZ.float()
    norm_N = scores_NZ.logsumexp(-1)
    index_N1 = torch.tensor(ids, device=scores_NZ.device)[:, None]
    chosen = (scores_NZ.gather(-1, index_N1)[:, 0] - norm_N).tolist()
    most = min(max(tops, default=0), scores_NZ.shape[-1])
    if most == 0:
        return [TokenLogprob(*pair) for pair in zip(ids, chosen, strict=True)]
    values_NK, tokens_NK = scores_NZ.topk(most, dim=-1)
    pairs = zip(tokens_NK.tolist(), (values_NK - norm_N[:, None]).tolist())
    best = [sorted(zip(tokens, values), key=lambda pair: (-pair[1], pair[0])) for tokens, values in pairs]
    return [TokenLogprob(*row[:2], tuple(row[2][: row[3]])) for row in zip(ids, chosen, best, tops, strict=True)]


class Sampler:
    """A batch that is drawn from start to end, rows leaving as they finish.

    Args:
        params: one a row.
        stream: which answer to its request each row is; default 0.
        prompts: tokens of each row's prompt, for the repetition penalty.
        ends: tokens that end a document or a message.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        stream: Sequence[int] | None = None,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.rows = [
            SamplingRow(param, prompts[row] if prompts else (), stream=stream[row] if stream else 0, ends=ends)
            for row, param in enumerate(params)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch only, in this order; each keeps its random numbers."""
        self.rows = [self.rows[row] for row in rows]

    def draw(self, logits_BZ: Tensor, masks: Sequence[Mask | None] | None = None) -> list[int]:
        """Token ids of `draw_rows`."""
        return [token_id for token_id, _ in draw_rows(self.rows, logits_BZ, masks)]
