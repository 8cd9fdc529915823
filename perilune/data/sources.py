"""Endless sequences of windows, addressed by number.

A source is stateless: window i of length T under a key is always the same one. Text is shuffled anew in each epoch and
cut at another phase; synthetic windows are made from a generator seeded with the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from perilune.data.order import hash_integers, permuted
from perilune.data.packing import IGNORE, Window, count_windows, window
from perilune.data.shards import TokenStream
from perilune.data.synthetic.task import Task
from perilune.errors import ConfigError, RequestError

_PHASED_FROM_WINDOWS = 8


class Source(Protocol):
    """Where windows come from."""

    fingerprint: str

    def window(self, index: int, seq_len: int, key: Sequence[int]) -> Window:
        """Window `index` of the endless sequence that `key` orders."""
        ...


class TextSource:
    """Windows of a token stream, every one once an epoch in an order that (key, epoch) decides."""

    def __init__(self, stream: TokenStream) -> None:
        """Read from `stream`."""
        self._stream = stream
        self.fingerprint = stream.fingerprint

    def windows_per_epoch(self, seq_len: int) -> int:
        """Windows of an epoch; one is given up for a phase that moves, once there are 8. RequestError if 0."""
        count = count_windows(self._stream, seq_len)
        if count == 0:
            raise RequestError(
                f"the training part has {self._stream.num_tokens} tokens, too few for one window of {seq_len}; "
                "shorten the window (stages.seq_len) or add text"
            )
        return count - 1 if count >= _PHASED_FROM_WINDOWS else count

    def window(self, index: int, seq_len: int, key: Sequence[int]) -> Window:
        """Window `index`: the (index mod windows)-th of its epoch."""
        count = self.windows_per_epoch(seq_len)
        epoch, position = divmod(index, count)
        slack = self._stream.num_tokens - 1 - count * seq_len
        phase = hash_integers([*key, epoch, seq_len]) % (slack + 1)
        return window(self._stream, phase + permuted(position, count, [*key, epoch]) * seq_len, seq_len)


class SyntheticSource:
    """Windows of synthetic tasks, each task in turn; only answers are trained on.

    Symbol s of a task is id s of the model's vocabulary.
    """

    def __init__(self, tasks: Sequence[Task], ordinary_ids: int) -> None:
        """`ordinary_ids`: ids below this are not control tokens; ConfigError if a task needs more symbols."""
        for task in tasks:
            if task.symbols > ordinary_ids:
                raise ConfigError(
                    f"synthetic task {task.name!r} needs {task.symbols} symbols, the vocabulary has {ordinary_ids} "
                    "ordinary ids; use a larger vocabulary or a smaller task"
                )
        self._tasks = tuple(tasks)
        self.fingerprint = "synthetic " + " ".join(repr(task) for task in tasks)

    def window(self, index: int, seq_len: int, key: Sequence[int]) -> Window:
        """Window `index`: an example of task `index mod tasks`, made from a generator seeded with (key, index)."""
        rng = np.random.default_rng([*key, index])
        example = self._tasks[index % len(self._tasks)].make(rng, seq_len)
        assert example.ids.shape == example.targets.shape == (seq_len,), "a task fills its window"
        assert (example.targets != IGNORE).any(), "a task asks for something"
        starts = np.zeros(seq_len, dtype=np.bool_)
        starts[0] = True
        return Window(example.ids, example.targets, starts)
