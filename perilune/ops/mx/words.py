"""Floating-point numbers as integers: where the exponent lies in a float32 and in a float64."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Word(NamedTuple):
    """Layout of a floating-point type.

    Attributes:
        integer: integer type of the same width.
        mantissa: stored bits of mantissa.
        bias: of the exponent.
    """

    integer: torch.dtype
    mantissa: int
    bias: int

    @property
    def exponent_mask(self) -> int:
        """The bits of the exponent."""
        return (2 * self.bias + 1) << self.mantissa


_WORDS = {torch.float32: Word(torch.int32, 23, 127), torch.float64: Word(torch.int64, 52, 1023)}


def word(dtype: torch.dtype) -> Word:
    """Layout of float32 or float64."""
    assert dtype in _WORDS, f"bit arithmetic is written for float32 and float64, not {dtype}"
    return _WORDS[dtype]
