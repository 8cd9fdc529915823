"""Baselines against a dictionary oracle and against the formulas."""

from __future__ import annotations

import gzip
import lzma
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.document import Corpus, Document
from perilune.data.prepare import prepare
from perilune.eval.baselines import Trigram, baselines, compressed_bits_per_byte


class SlowTrigram:
    """Witten-Bell from dictionaries, one probability at a time."""

    def __init__(self, tokens, vocab_size):
        self.vocab_size = vocab_size
        self.after = defaultdict(Counter)
        for order in (0, 1, 2):
            for end in range(order, len(tokens)):
                self.after[tuple(tokens[end - order : end])][tokens[end]] += 1

    def p(self, word, history):
        lower = self.p(word, history[1:]) if history else 1.0 / self.vocab_size
        follow = self.after.get(history)
        if not follow:
            return lower
        return (follow[word] + len(follow) * lower) / (sum(follow.values()) + len(follow))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), vocab_size=st.integers(2, 7))
def test_trigram_equals_the_oracle_and_sums_to_one(data, vocab_size):
    ids = st.integers(0, vocab_size - 1)
    train = data.draw(st.lists(ids, min_size=3, max_size=40))
    test = data.draw(st.lists(ids, min_size=1, max_size=20))
    context = (data.draw(ids), data.draw(ids))
    slow, fast = SlowTrigram(train, vocab_size), Trigram(np.array(train), vocab_size)
    stream = [*context, *test]
    expected = [slow.p(stream[i], tuple(stream[i - 2 : i])) for i in range(2, len(stream))]
    np.testing.assert_allclose(fast.probabilities(np.array(stream)), expected, rtol=1e-12)
    assert math.isclose(fast.nats(np.array(test), context), -sum(map(math.log, expected)), rel_tol=1e-12)
    total = sum(fast.probabilities(np.array([*context, word]))[0] for word in range(vocab_size))
    assert math.isclose(total, 1.0, rel_tol=1e-12)


def test_large_vocabulary_does_not_overflow():
    z = 163_840
    tokens = np.array([z - 1, z - 2, z - 1, z - 2, z - 3, z - 1, z - 2])
    slow = SlowTrigram(tokens.tolist(), z)
    expected = slow.p(z - 3, (z - 1, z - 2))
    assert math.isclose(Trigram(tokens, z).probabilities(np.array([z - 1, z - 2, z - 3]))[0], expected, rel_tol=1e-12)


def test_compressors():
    text = b"moon " * 1000
    assert compressed_bits_per_byte(text) == (
        8 * len(gzip.compress(text, 9, mtime=0)) / 5000,
        8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / 5000,
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    documents = [Document.of(f"{i}", f"{i}", " ".join(rng.choice(words, size=400))) for i in range(20)]
    cache = tmp_path_factory.mktemp("cache")
    return prepare(Corpus.of(documents), holdout=0.3, tokenizer="bpe", vocab_size=400, cache=cache)


def test_all_baselines_on_the_same_bytes(prepared):
    """Words drawn evenly from five: the entropy is known, and the trigram comes close to it from above."""
    found = baselines(prepared)
    text = prepared.held_out_bytes()
    entropy = math.log2(5) * (1 + text.count(b" ")) / len(text)
    assert entropy < found.trigram < 1.1 * entropy
    assert found.gzip9 == compressed_bits_per_byte(text)[0] > found.trigram


def test_trigram_is_charged_for_every_token(prepared):
    ids = prepared.held_out.read(0, prepared.held_out.num_tokens).tolist()
    eos = prepared.tokenizer.special.eos
    slow = SlowTrigram(prepared.train.read(0, prepared.train.num_tokens).tolist(), prepared.tokenizer.vocab_size)
    stream = [eos, eos, *ids]
    nats = -sum(math.log(slow.p(stream[i], tuple(stream[i - 2 : i]))) for i in range(2, len(stream)))
    expected = nats / math.log(2) / len(prepared.held_out_bytes())
    assert math.isclose(baselines(prepared).trigram, expected, rel_tol=1e-9)
