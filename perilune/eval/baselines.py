"""What a model has to beat: general compressors and a count model, on the same held-out bytes.

`gzip -9` knows 32 KB of context, `xz -9e` the whole text. The trigram sees the training tokens of the model, in the
model's tokenizer, so it tells whether the network learnt more than which three tokens stand together.
"""

from __future__ import annotations

import gzip
import lzma
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.data.prepare import PreparedData


@dataclass(frozen=True, slots=True)
class Baselines:
    """Bits per byte of the held-out text."""

    gzip9: float
    xz9e: float
    trigram: float


def baselines(data: PreparedData) -> Baselines:
    """All baselines; the trigram is charged for every held-out token, `[EOS]` and first tokens included."""
    text = data.held_out_bytes()
    eos = data.tokenizer.special.eos
    model = Trigram(data.train.read(0, data.train.num_tokens), data.tokenizer.vocab_size)
    nats = model.nats(data.held_out.read(0, data.held_out.num_tokens), context=(eos, eos))
    return Baselines(*compressed_bits_per_byte(text), nats / math.log(2) / len(text))


def compressed_bits_per_byte(text: bytes) -> tuple[float, float]:
    """(gzip -9, xz -9e) of one byte string, headers included."""
    zipped = len(gzip.compress(text, compresslevel=9, mtime=0))
    xzipped = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    return 8 * zipped / len(text), 8 * xzipped / len(text)


class Trigram:
    """Interpolated Witten-Bell trigram (Chen and Goodman 1999, eq. 14-16).

    With n(hw) counts of w after history h, N(h) their sum and U(h) the number of different words after h:

        p(w | h) = (n(hw) + U(h) p(w | h')) / (N(h) + U(h)),     h' = h without its first word

    and p(w | h') alone if h was never seen. Below the unigram stands the uniform distribution, so that every token has a
    probability above 0 and they sum to 1.
    """

    def __init__(self, tokens: NDArray[np.int64], vocab_size: int) -> None:
        """Count `tokens` (int64 `[N]`, ids below `vocab_size`, N >= 3)."""
        assert len(tokens) >= 3, "a trigram needs three tokens"
        assert vocab_size < 1 << 21, "three ids are packed into 63 bits"
        self._vocab = vocab_size
        self._tables = [_Counts(self._windows(tokens, order), vocab_size) for order in (1, 2, 3)]

    def nats(self, tokens: NDArray[np.int64], context: tuple[int, int]) -> float:
        """-ln p of all `tokens`, int64 `[N]`; `context` = the two tokens before the first."""
        stream = np.concatenate([np.array(context, dtype=np.int64), tokens])
        return float(-np.log(self.probabilities(stream)).sum())

    def probabilities(self, stream: NDArray[np.int64]) -> NDArray[np.float64]:
        """p of each token of `stream` (int64 `[N + 2]`) from the third on, given the two before it: `[N]`."""
        probability = np.full(len(stream) - 2, 1.0 / self._vocab)
        for order, table in enumerate(self._tables, start=1):
            keys = self._windows(stream, order)[3 - order :]
            probability = table.interpolate(keys, probability)
        return probability

    def _windows(self, tokens: NDArray[np.int64], order: int) -> NDArray[np.int64]:
        """`[N - order + 1]`: each run of `order` tokens as one number in base vocab_size."""
        keys = tokens[: len(tokens) - order + 1]
        for shift in range(1, order):
            keys = keys * self._vocab + tokens[shift : len(tokens) - order + 1 + shift]
        return keys


class _Counts:
    """Counts of n-grams and of their histories, as sorted arrays."""

    def __init__(self, keys: NDArray[np.int64], vocab_size: int) -> None:
        self._vocab = vocab_size
        self._keys, self._counts = np.unique(keys, return_counts=True)
        # keys are sorted, so all n-grams of one history lie together
        self._histories, first, self._followers = np.unique(
            self._keys // vocab_size, return_index=True, return_counts=True
        )
        self._totals = np.add.reduceat(self._counts, first)

    def interpolate(self, keys: NDArray[np.int64], lower: NDArray[np.float64]) -> NDArray[np.float64]:
        """p(w | h) of each key from p(w | h')."""
        count = _lookup(self._keys, self._counts, keys)
        history = keys // self._vocab
        total = _lookup(self._histories, self._totals, history)
        followers = _lookup(self._histories, self._followers, history)
        return np.where(total > 0, (count + followers * lower) / np.maximum(total + followers, 1), lower)


def _lookup(keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Value of each wanted key, 0 if absent; `keys` are sorted."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
