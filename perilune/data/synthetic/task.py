"""What a synthetic task is: tokens whose answers are known, to find out what a mechanism can remember and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.errors import ConfigError

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Example:
    """One window.

    Attributes:
        ids: int64 `[T]`, symbols of the task's alphabet.
        targets: int64 `[T]`, the answer expected at a position, -100 where none is.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]


class Task(Protocol):
    """A generator of examples; its repr says all that decides them."""

    name: str
    symbols: int

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """An example of exactly `length` tokens. ConfigError if the task does not fit in that many."""
        ...


def answer_next(ids: NDArray[np.int64], answer: NDArray[np.bool_]) -> Example:
    """An example in which the tokens marked `answer` are to be predicted from what stands before them."""
    targets = np.full_like(ids, IGNORE)
    targets[:-1] = np.where(answer[1:], ids[1:], IGNORE)
    return Example(ids, targets)


def require(condition: bool, name: str, length: int, need: int) -> None:
    """ConfigError unless `condition`: the window of `length` tokens is too short for the task."""
    if not condition:
        raise ConfigError(f"synthetic task {name!r} needs windows of at least {need} tokens, got {length}")
