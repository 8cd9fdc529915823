"""Changes to logits that depend on a request: bias, forbidden tokens, and penalties for tokens that were said before."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from perilune.serve.request import SamplingParams
from perilune.serve.staging import to_device


class TokenCounts:
    """How often an answer has each token, and which tokens the prompt has.

    The tensors are made at the first use, when vocabulary and device are known, and from then on each token is one
    write, on the device, where it was drawn: a step costs the same however long the text is.

    Args:
        prompt: tokens of the prompt; ids below zero are skipped.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._prompt = sorted({token_id for token_id in prompt if token_id >= 0})
        self._early: list[Tensor] = []
        self._count_Z: Tensor | None = None
        self._prompt_Z: Tensor | None = None

    def add(self, ids_1: Tensor) -> None:
        """A token of the answer, int64 [1]."""
        if self._count_Z is None:
            self._early.append(ids_1)
        else:
            self._count_Z.index_add_(0, ids_1, torch.ones_like(ids_1, dtype=self._count_Z.dtype))

    def on(self, vocab: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(times in the answer [Z], whether in the prompt [Z]), in the dtype and on the device of `like`."""
        if self._count_Z is None or self._prompt_Z is None:
            self._count_Z = torch.zeros(vocab, dtype=like.dtype, device=like.device)
            self._prompt_Z = torch.zeros(vocab, dtype=torch.bool, device=like.device)
            self._prompt_Z.index_fill_(0, to_device(self._prompt, like.device, torch.int64), True)
            for ids_1 in self._early:
                self.add(ids_1)
        return self._count_Z, self._prompt_Z


def penalised(rows: Sequence[tuple[SamplingParams, TokenCounts | None]], logits_BZ: Tensor) -> Tensor:
    """Logits after the penalties of those rows that have counts; the given tensor if no row has."""
    some = [(index, params, counts) for index, (params, counts) in enumerate(rows) if counts is not None]
    if not some:
        return logits_BZ

    numbers = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in some]
    factor_N1, frequency_N1, presence_N1 = (
        to_device(numbers, logits_BZ.device, logits_BZ.dtype).T[:, :, None].unbind()
    )  # fmt: skip
    index = to_device([place for place, _, _ in some], logits_BZ.device)
    count_NZ, prompt_NZ = map(torch.stack, zip(*(c.on(logits_BZ.shape[-1], logits_BZ) for _, _, c in some)))
    scores_NZ = logits_BZ[index]
    repeated_NZ = torch.where(scores_NZ > 0, scores_NZ / factor_N1, scores_NZ * factor_N1)
    scores_NZ = torch.where(prompt_NZ | (count_NZ > 0), repeated_NZ, scores_NZ)
    scores_NZ -= frequency_N1 * count_NZ + presence_N1 * (count_NZ > 0)
    out_BZ = logits_BZ.clone()
    out_BZ[index] = scores_NZ
    return out_BZ


def add_biases(biases: Sequence[Sequence[tuple[int, float]]], logits_BZ: Tensor) -> Tensor:
    """Logits with each row's (token, number) added; the given tensor if there is none."""
    entries = [(row, token_id, value) for row, pairs in enumerate(biases) for token_id, value in pairs]
    if not entries:
        return logits_BZ
    device = logits_BZ.device
    row_E, token_E = to_device([entry[:2] for entry in entries], device).T.unbind()
    value_E = to_device([entry[2] for entry in entries], device, logits_BZ.dtype)
    return logits_BZ.clone().index_put_((row_E, token_E), value_E, accumulate=True)


def forbid(tokens: Sequence[Collection[int]], logits_BZ: Tensor) -> Tensor:
    """Logits with -inf for each row's tokens, unless these are all there are; the given tensor if there is none."""
    vocab = logits_BZ.shape[-1]
    entries = [(row, token) for row, some in enumerate(tokens) if len(some) < vocab for token in some]
    if not entries:
        return logits_BZ
    row_E, token_E = to_device(entries, logits_BZ.device).T.unbind()
    least = torch.full((), -math.inf, dtype=logits_BZ.dtype, device=logits_BZ.device)
    return logits_BZ.clone().index_put_((row_E, token_E), least)
