"""Changes to logits that depend on a request: bias, and penalties for tokens that were said before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from perilune.serve.request import SamplingParams


class TokenCounts:
    """How often an answer has each token, and which tokens the prompt has.

    The tensors are made at the first use, when vocabulary and device are known, and from then on each token is one
    write: a step costs the same however long the text is.

    Args:
        prompt: tokens of the prompt; ids below zero are skipped.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._prompt = sorted({token_id for token_id in prompt if token_id >= 0})
        self._early: list[int] = []
        self._count_Z: Tensor | None = None
        self._prompt_Z: Tensor | None = None

    def add(self, token_id: int) -> None:
        """A token of the answer."""
        if self._count_Z is None:
            self._early.append(token_id)
        else:
            self._count_Z[token_id] += 1

    def on(self, vocab: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(times in the answer [Z], whether in the prompt [Z]), in the dtype and on the device of `like`."""
        if self._count_Z is None or self._prompt_Z is None:
            self._count_Z = torch.zeros(vocab, dtype=like.dtype, device=like.device)
            self._prompt_Z = torch.zeros(vocab, dtype=torch.bool, device=like.device)
            self._prompt_Z[self._prompt] = True
            for token_id in self._early:
                self._count_Z[token_id] += 1
        return self._count_Z, self._prompt_Z


def penalised(rows: Sequence[tuple[SamplingParams, TokenCounts | None]], logits_BZ: Tensor) -> Tensor:
    """Logits after the penalties of those rows that have counts; the given tensor if no row has."""
    some = [(index, params, counts) for index, (params, counts) in enumerate(rows) if counts is not None]
    if not some:
        return logits_BZ

    def column(name: str) -> Tensor:
        values = [getattr(params, name) for _, params, _ in some]
        return torch.tensor(values, dtype=logits_BZ.dtype, device=logits_BZ.device)[:, None]

    index = [place for place, _, _ in some]
    count_NZ, prompt_NZ = map(torch.stack, zip(*(c.on(logits_BZ.shape[-1], logits_BZ) for _, _, c in some)))
    scores_NZ = logits_BZ[index]
    factor_N1 = column("repetition_penalty")
    repeated_NZ = torch.where(scores_NZ > 0, scores_NZ / factor_N1, scores_NZ * factor_N1)
    scores_NZ = torch.where(prompt_NZ | (count_NZ > 0), repeated_NZ, scores_NZ)
    scores_NZ -= column("frequency_penalty") * count_NZ + column("presence_penalty") * (count_NZ > 0)
    out_BZ = logits_BZ.clone()
    out_BZ[index] = scores_NZ
    return out_BZ


def add_biases(biases: Sequence[Sequence[tuple[int, float]]], logits_BZ: Tensor) -> Tensor:
    """Logits with each row's (token, number) added; the given tensor if there is none."""
    entries = [(row, token_id, value) for row, pairs in enumerate(biases) for token_id, value in pairs]
    if not entries:
        return logits_BZ
    row_E, token_E, value_E = zip(*entries)
    device = logits_BZ.device
    where = (torch.tensor(row_E, device=device), torch.tensor(token_E, device=device))
    value = torch.tensor(value_E, dtype=logits_BZ.dtype, device=device)
    return logits_BZ.clone().index_put_(where, value, accumulate=True)
