"""Held-out nats: every token once, all of a document's past, the same number however it is cut into passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from perilune.config.presets import tiny
from perilune.errors import RequestError
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.train.heldout import choose, score_held_out

EOS = 511


class Stream:
    """Documents in memory, each ending in EOS."""

    fingerprint = ""

    def __init__(self, lengths: list[int]) -> None:
        draw = np.random.default_rng(0)
        self.documents = [np.append(draw.integers(0, 500, n - 1), EOS) for n in lengths]
        self.tokens = np.concatenate(self.documents) if lengths else np.zeros(0, dtype=np.int64)
        self.offsets = np.cumsum([0, *lengths])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop].copy()


TOKEN_BYTES = np.array([1] * 500 + [0] * 12)
LENGTHS = [3, 90, 1, 41, 17, 64, 2]


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = init_weights(Transformer(tiny()), 1).double().eval()
    made.compute_dtype = torch.float64
    with torch.no_grad():  # away from the symmetric start, so that context matters
        for p in made.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return made


def one_by_one(model: Transformer, documents: list[np.ndarray]) -> float:
    """The definition: each document in one pass without a state."""
    nats = 0.0
    with torch.no_grad():
        for document in documents:
            nats += math.log(len(TOKEN_BYTES))
            if len(document) > 1:
                ids = torch.from_numpy(document)[None]
                nats += float(model.token_nats(ids[:, :-1], ids[:, 1:]).sum())
    return nats


@pytest.mark.parametrize(("chunk", "batch_tokens"), [(1024, 8192), (16, 64), (32, 32), (1, 5), (7, 1000)])
def test_any_cut_into_passes_gives_the_definition(model, chunk, batch_tokens):
    stream = Stream(LENGTHS)
    result = score_held_out(model, stream, TOKEN_BYTES, chunk=chunk, batch_tokens=batch_tokens)
    assert result.nats == pytest.approx(one_by_one(model, stream.documents), rel=1e-9)
    assert result.bytes == sum(LENGTHS) - len(LENGTHS), "every byte; EOS has none"
    assert result.tokens == sum(LENGTHS) and result.documents == len(LENGTHS)
    assert result.bits_per_byte == pytest.approx(result.nats / math.log(2) / result.bytes)


def test_a_bounded_context_drops_no_token(model):
    stream = Stream([50])
    bounded = score_held_out(model, stream, TOKEN_BYTES, chunk=8, max_context=20)
    document = stream.documents[0]
    expected = math.log(len(TOKEN_BYTES))
    with torch.no_grad():
        for start in range(0, 49, 20):
            ids = torch.from_numpy(document[start : min(start + 21, 50)])[None]
            expected += float(model.token_nats(ids[:, :-1], ids[:, 1:]).sum())
    assert bounded.nats == pytest.approx(expected, rel=1e-9)
    assert bounded.tokens == 50


def test_a_budget_takes_whole_documents_in_a_fixed_order_and_cuts_the_last():
    lengths = np.array(LENGTHS)
    assert choose(lengths, 0) == dict(enumerate(LENGTHS))
    some = choose(lengths, 60)
    assert sum(some.values()) == 60
    assert sum(n < LENGTHS[i] for i, n in some.items()) <= 1
    assert choose(lengths, 60) == some
    assert choose(lengths, 10_000) == dict(enumerate(LENGTHS))


def test_scoring_leaves_the_model_as_it_was(model):
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    score_held_out(model, Stream([20, 9]), TOKEN_BYTES)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(int(layer.counts_E.sum()) == 0 for layer in model.moe_layers())
    model.eval()


def test_nothing_to_score_is_an_error(model):
    with pytest.raises(RequestError, match="held-out part is empty"):
        score_held_out(model, Stream([1]), TOKEN_BYTES)
