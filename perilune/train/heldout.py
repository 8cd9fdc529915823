"""Nats of held-out documents under a model: every token scored once, given the document's own past.

A document longer than a chunk goes on with the model's state, so no text is dropped and context reaches back thousands of
tokens, not just to the start of a window. Documents of similar length share a batch and leave it as they end. What a
document costs: each token given the ones before it, `[EOS]` included; its first token, which nothing precedes, is
charged ln(vocabulary).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.data.order import hash_integers
from perilune.data.packing import IGNORE
from perilune.data.shards import TokenStream
from perilune.errors import RequestError
from perilune.model.transformer import Transformer

CHUNK = 512
"""Tokens of a document that one forward pass takes."""
BATCH_TOKENS = 8192
"""Tokens of one forward pass over all documents."""
MAX_CONTEXT = 8192
"""Tokens after which a document's state begins anew: it bounds the time and memory that one document needs."""


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """What a model pays for a text.

    Attributes:
        nats: summed cost of all tokens.
        bytes: UTF-8 bytes of the scored text.
        tokens: tokens scored, first tokens and `[EOS]` included.
        documents: documents scored, whole or cut by `max_tokens`.
        seconds: time it took.
    """

    nats: float
    bytes: int
    tokens: int
    documents: int
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 / bytes."""
        return self.nats / math.log(2) / self.bytes


def choose(lengths: NDArray[np.int64], max_tokens: int) -> dict[int, int]:
    """Which documents to score, and how many tokens of each: all, or in a fixed shuffled order until `max_tokens`."""
    if max_tokens == 0 or lengths.sum() <= max_tokens:
        return {i: int(n) for i, n in enumerate(lengths)}
    chosen, left = {}, max_tokens
    for i in sorted(range(len(lengths)), key=lambda i: hash_integers([i])):
        if left <= 0:
            break
        chosen[i] = min(left, int(lengths[i]))
        left -= chosen[i]
    return chosen


def _groups(chosen: dict[int, int], chunk: int, batch_tokens: int) -> Iterator[list[int]]:
    """Documents by falling length, as many together as fill a forward pass."""
    order = sorted(chosen, key=lambda i: (-chosen[i], i))
    while order:
        rows = max(1, batch_tokens // min(chunk, chosen[order[0]]))
        yield order[:rows]
        order = order[rows:]


def _score(model: Transformer, documents: list[Tensor], chunk: int, max_context: int) -> float:
    """Nats of all but the first token of each document; documents are sorted by falling length."""
    nats = 0.0
    position, alive = 0, sum(len(d) > 1 for d in documents)
    state = None
    while alive:
        longest = len(documents[0]) - 1 - position
        if state is None or state.length >= max_context:
            state = model.new_state(alive, capacity=min(longest, max_context))
        width = min(chunk, longest, max_context - state.length)
        ids = torch.zeros(alive, width, dtype=torch.int64)
        targets = torch.full((alive, width), IGNORE)
        for row in range(alive):
            piece = documents[row][position : position + width + 1]
            ids[row, : len(piece) - 1] = piece[:-1]
            targets[row, : len(piece) - 1] = piece[1:]
        ids, targets = ids.to(model.device), targets.to(model.device)
        nats += float(model.token_nats(ids, targets, state).double().sum())
        position += width
        still = sum(len(d) - 1 > position for d in documents[:alive])
        if still < alive and still:
            state = state.select(range(still))
        alive = still
    return nats


@torch.no_grad()
def score_held_out(
    model: Transformer,
    stream: TokenStream,
    token_bytes: NDArray[np.int64],
    *,
    max_tokens: int = 0,
    chunk: int = CHUNK,
    batch_tokens: int = BATCH_TOKENS,
    max_context: int = MAX_CONTEXT,
) -> HeldOutResult:
    """Score held-out documents.

    Args:
        model: put into evaluation mode for this and back.
        stream: the documents, each ending in `[EOS]`.
        token_bytes: int64 `[vocabulary]`, bytes of each id (0 for control ids).
        max_tokens: about this many tokens of documents in a fixed shuffled order; 0 = everything.
        chunk: tokens of a document in one forward pass; it changes speed, not the result.
        batch_tokens: tokens of one forward pass over all documents.
        max_context: tokens after which a document's state begins anew; no token is dropped there.

    Raises:
        RequestError: there is no text to score.
    """
    begin = time.perf_counter()
    chosen = choose(np.diff(stream.offsets), max_tokens)
    was_training = model.training
    model.eval()
    nats, num_bytes, tokens = 0.0, 0, 0
    try:
        for group in _groups(chosen, chunk, batch_tokens):
            documents = [stream.read(int(stream.offsets[i]), int(stream.offsets[i]) + chosen[i]) for i in group]
            num_bytes += sum(int(token_bytes[d].sum()) for d in documents)
            tokens += sum(len(d) for d in documents)
            nats += len(documents) * math.log(len(token_bytes))
            nats += _score(model, [torch.from_numpy(d) for d in documents], chunk, max_context)
    finally:
        model.train(was_training)
    if num_bytes == 0:
        raise RequestError("the held-out part is empty; raise data.holdout or add text")
    return HeldOutResult(nats, num_bytes, tokens, len(chosen), time.perf_counter() - begin)
