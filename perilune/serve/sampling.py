"""From logits to token ids: what is forbidden, bias, penalties, temperature, top-k, top-p, min-p, one draw a row.

A batch is whatever rows a step happens to have: `draw_rows` takes them together, and each row's tokens are those that it
would draw alone. For that, filters look at one row each (`filters`), and a random number is a function of (seed, stream,
place in the answer) and of nothing else: not of the batch, the device, or an interruption. One uniform number is looked up
in the cumulative distribution in id order.

`start_draw` does all of this on the device and waits for nothing, so that the next step can be launched behind it; whoever
wants to know the tokens asks the `Draw` for them.

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
from perilune.serve.filters import kept_weights, pick
from perilune.serve.penalties import TokenCounts, add_biases, forbid, penalised
from perilune.serve.request import SamplingParams, TokenLogprob
from perilune.serve.staging import Readback, to_device

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

    def take(self, ids_1: Tensor) -> None:
        """Note a token of the answer, int64 [1]: `start_draw` does it for what it draws."""
        self.drawn += 1
        if self.counts is not None:
            self.counts.add(ids_1)


class Draw:
    """A draw that the device makes, or has made.

    Args:
        ids_B: the tokens, on the device; the next step may use them before anybody has looked.
        largest_B: largest score of each row.
        scored: rows whose log-probabilities are asked for, with their numbers of most likely tokens.
        logprobs: see `_logprob_tensors`.
    """

    def __init__(
        self, ids_B: Tensor, largest_B: Tensor, scored: Sequence[tuple[int, int]], logprobs: Sequence[Tensor]
    ) -> None:
        self.ids_B = ids_B
        self._scored = scored
        self._read = Readback([ids_B, largest_B, *logprobs])

    def read(self) -> list[Drawn]:
        """What was drawn, once it is.

        Raises:
            CheckpointError: a row's largest logit is not finite; sampling from it would be meaningless.
        """
        ids_B, largest_B, *scores = self._read.wait()
        _check_finite(largest_B.tolist())
        ids = ids_B.tolist()
        if not self._scored:
            return [Drawn(token_id, None) for token_id in ids]
        chosen = [ids[row] for row, _ in self._scored]
        found = _named(chosen, [top for _, top in self._scored], scores)
        logprobs = {row: one for (row, _), one in zip(self._scored, found)}
        return [Drawn(token_id, logprobs.get(row)) for row, token_id in enumerate(ids)]


@torch.inference_mode()
def start_draw(rows: Sequence[SamplingRow], logits_BZ: Tensor, masks: Sequence[Mask | None] | None = None) -> Draw:
    """Draw the next token of every row; the rows take note of it. On a GPU nothing waits for the device.

    Args:
        rows: one a row of the logits, in any order and company.
        logits_BZ: any float dtype; fp32 is used inside, fp64 stays.
        masks: what a row's grammar allows; None = everything.
    """
    device = logits_BZ.device
    logits_BZ = logits_BZ if logits_BZ.dtype == torch.float64 else logits_BZ.float()
    scores_BZ = adjusted(rows, logits_BZ, masks)
    largest_B, ids_B = scores_BZ.max(-1)
    random = [index for index, row in enumerate(rows) if not row.params.greedy]
    if random:
        index = None if len(random) == len(rows) else to_device(random, device)
        weights_NZ = kept_weights(scores_BZ if index is None else scores_BZ[index], [rows[i].params for i in random])
        numbers_N = uniforms([(rows[i].seed, rows[i].stream, rows[i].drawn) for i in random])
        picked_N = pick(weights_NZ, numbers_N)
        ids_B = picked_N if index is None else ids_B.index_copy(0, index, picked_N)
    scored = [(index, row.params.logprobs) for index, row in enumerate(rows) if row.params.logprobs is not None]
    logprobs: Sequence[Tensor] = ()
    if scored:
        index = to_device([row for row, _ in scored], device)
        logprobs = _logprob_tensors(logits_BZ[index], ids_B[index], max(top for _, top in scored))
    for place, row in enumerate(rows):
        row.take(ids_B[place : place + 1])
    return Draw(ids_B, largest_B, scored, logprobs)


def draw_rows(
    rows: Sequence[SamplingRow], logits_BZ: Tensor, masks: Sequence[Mask | None] | None = None
) -> list[Drawn]:
    """`start_draw`, and what it drew. CheckpointError as in `Draw.read`."""
    return start_draw(rows, logits_BZ, masks).read()


def _check_finite(largest: Sequence[float]) -> None:
    for row, value in enumerate(largest):
        if not math.isfinite(value):
            raise CheckpointError(
                f"the model returned {value} logits (row {row}), so no token can be drawn: the weights have "
                "diverged or are damaged; use an earlier checkpoint"
            )


def adjusted(rows: Sequence[SamplingRow], logits_BZ: Tensor, masks: Sequence[Mask | None] | None = None) -> Tensor:
    """Logits after grammar, forbidden tokens, bias and penalties; the given ones if there is none of these."""
    vocab = logits_BZ.shape[-1]
    scores_BZ = add_biases([row.params.logit_bias for row in rows], logits_BZ)
    scores_BZ = penalised([(row.params, row.counts) for row in rows], scores_BZ)
    masks = [None] * len(rows) if masks is None else masks
    pairs = list(zip(rows, masks, strict=True))
    scores_BZ = allowed_only(scores_BZ, [None if mask is None else _allowed(row, mask) for row, mask in pairs])
    forbidden = [[t for t in row.forbidden if t < vocab] if mask is None else () for row, mask in pairs]
    return forbid(forbidden, scores_BZ)


def _allowed(row: SamplingRow, mask: Mask) -> Mask:
    """What a row may draw. A grammar that allows nothing but forbidden tokens has the last word."""
    forbidden = [token_id for token_id in row.forbidden if token_id < len(mask)]
    if not forbidden:
        return mask
    left = mask.copy()
    left[forbidden] = False
    return left if left.any() else mask


def allowed_only(logits_BZ: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """Logits with -inf for every token that a row's mask forbids; rows without a mask stay as they are."""
    if all(mask is None for mask in masks):
        return logits_BZ
    every = np.ones(logits_BZ.shape[-1], dtype=np.bool_)
    forbidden_BZ = ~np.stack([every if mask is None else mask for mask in masks])
    return logits_BZ.masked_fill(to_device(forbidden_BZ, logits_BZ.device), -math.inf)


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
    ids_N = to_device(ids, logits_NZ.device)
    return _named(ids, tops, Readback(_logprob_tensors(logits_NZ, ids_N, max(tops, default=0))).wait())


def _logprob_tensors(logits_NZ: Tensor, ids_N: Tensor, most: int) -> list[Tensor]:
    """Log-probabilities of the tokens [N], and with `most` above 0 the most likely tokens and theirs, [N, most] each."""
    scores_NZ = logits_NZ if logits_NZ.dtype == torch.float64 else logits_NZ.float()
    norm_N1 = scores_NZ.logsumexp(-1, keepdim=True)
    chosen_N = (scores_NZ.gather(-1, ids_N[:, None]) - norm_N1)[:, 0]
    if most == 0:
        return [chosen_N]
    values_NK, tokens_NK = scores_NZ.topk(min(most, scores_NZ.shape[-1]), dim=-1)
    return [chosen_N, tokens_NK, values_NK - norm_N1]


def _named(ids: Sequence[int], tops: Sequence[int], tensors: Sequence[Tensor]) -> list[TokenLogprob]:
    """From `_logprob_tensors` to what is told, `tops[row]` of the most likely tokens each."""
    chosen, *best = (tensor.tolist() for tensor in tensors)
    if not best:
        return [TokenLogprob(*pair) for pair in zip(ids, chosen, strict=True)]
    ordered = [sorted(zip(*row), key=lambda pair: (-pair[1], pair[0])) for row in zip(*best)]
    return [TokenLogprob(*row[:2], tuple(row[2][: row[3]])) for row in zip(ids, chosen, ordered, tops, strict=True)]


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
