"""Scoring held-out text: which windows, and how nats become bits per byte.

Bits per byte compares models with different tokenizers, and with gzip: it counts everything it takes to write down the
bytes. A model is charged for every token, `[EOS]` included. The first token of a document, which it does not predict,
costs ln(vocabulary), the price of naming it outright.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.data.loader import Batch
from perilune.data.packing import IGNORE, begins
from perilune.data.shards import TokenStream
from perilune.errors import RequestError


class HeldOut:
    """Windows over a held-out stream, each token a target once.

    Attributes:
        num_bytes: UTF-8 bytes of the scored text.
        num_predicted: targets that the model must predict.
        num_unpredicted: first tokens of documents, charged ln(vocabulary).
    """

    def __init__(
        self,
        stream: TokenStream,
        token_bytes: NDArray[np.int64],
        *,
        seq_len: int,
        max_tokens: int = 0,
    ) -> None:
        """Choose the windows.

        Args:
            stream: the held-out documents.
            token_bytes: int64 `[vocabulary]`, bytes of each id (0 for control ids).
            seq_len: window length; context does not reach across windows.
            max_tokens: score about this many tokens, in windows spread evenly over the stream; 0 = all.
        """
        if stream.num_tokens < 2:
            raise RequestError("the held-out part is empty; raise data.holdout or add text")
        self._stream, self._seq_len, self._vocab = stream, seq_len, len(token_bytes)
        count = math.ceil((stream.num_tokens - 1) / seq_len)
        chosen = count if max_tokens == 0 else max(1, min(count, max_tokens // seq_len))
        self._windows = np.unique(np.linspace(0, count - 1, chosen).round().astype(np.int64))
        self.num_bytes = self.num_predicted = self.num_unpredicted = 0
        for index in self._windows:
            start = int(index) * seq_len
            # position 0 of the stream is the target of no window: it goes with the first one
            first = start + (index > 0)
            targets = stream.read(first, start + seq_len + 1)
            unpredicted = int(begins(stream, first, len(targets)).sum())
            self.num_bytes += int(token_bytes[targets].sum())
            self.num_unpredicted += unpredicted
            self.num_predicted += len(targets) - unpredicted

    def batches(self, rows: int) -> Iterator[Batch]:
        """The windows, `rows` at a time. The last window of the stream is filled up with targets -100."""
        for first in range(0, len(self._windows), rows):
            shape = (len(self._windows[first : first + rows]), self._seq_len)
            ids, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
            starts = np.zeros(shape, dtype=np.bool_)
            for row, index in enumerate(self._windows[first : first + rows]):
                start = int(index) * self._seq_len
                tokens = self._stream.read(start, start + self._seq_len + 1)
                length = len(tokens) - 1
                new = begins(self._stream, start, length + 1)
                ids[row, :length], starts[row, :length] = tokens[:-1], new[:-1]
                targets[row, :length] = np.where(new[1:], IGNORE, tokens[1:])
            yield Batch(torch.from_numpy(ids), torch.from_numpy(targets), torch.from_numpy(starts))

    def bits_per_byte(self, nats: float) -> float:
        """From the summed cross-entropy of all predicted targets, in nats."""
        return (nats + self.num_unpredicted * math.log(self._vocab)) / math.log(2) / self.num_bytes
