"""A needle in a haystack: a few facts hidden at random depths, asked for at the end.

`Needle` is the bare form over symbols, for training and for small models. `hide_in_text` puts sentences into real
text, for a model with a tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perilune.data.synthetic.task import Example, answer_next, require
from perilune.tokenizer import Tokenizer


@dataclass(frozen=True)
class Needle:
    """Hay symbols with `needles` facts `! key d1 d2 d3` among them; the window ends with `? key d1 d2 d3`, one a fact.

    Attributes: hay, keys, digits = alphabet sizes; needles = facts in a window; answer_len = digits of a fact.
    """

    hay: int = 32
    keys: int = 16
    digits: int = 10
    needles: int = 4
    answer_len: int = 3
    name: str = "needle"

    @property
    def symbols(self) -> int:
        """Hay, keys, digits, `!` and `?`."""
        return self.hay + self.keys + self.digits + 2

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """Facts lie at uniform depths and never overlap; questions come in another order."""
        fact = self.answer_len + 2
        need = 2 * self.needles * fact
        require(length >= need, self.name, length, need)
        assert self.needles <= self.keys, "one key a needle"
        key = self.hay + rng.permutation(self.keys)[: self.needles]
        digit = self.hay + self.keys + rng.integers(self.digits, size=(self.needles, self.answer_len))
        tell, ask = self.symbols - 2, self.symbols - 1
        body = length - self.needles * fact
        gaps = np.sort(rng.integers(body - self.needles * fact + 1, size=self.needles))
        ids = rng.integers(self.hay, size=length).astype(np.int64)
        answer = np.zeros(length, dtype=np.bool_)
        for number in range(self.needles):
            at = gaps[number] + number * fact
            ids[at : at + fact] = [tell, key[number], *digit[number]]
        for place, number in enumerate(rng.permutation(self.needles)):
            at = body + place * fact
            ids[at : at + fact] = [ask, key[number], *digit[number]]
            answer[at + 2 : at + fact] = True
        return answer_next(ids, answer)


@dataclass(frozen=True, slots=True)
class TextNeedle:
    """A prompt that ends with a question, the ids of its answer, and where the fact stands (0 = start, 1 = end)."""

    prompt: list[int]
    answer: list[int]
    depth: float


def hide_in_text(
    tokenizer: Tokenizer, hay: Sequence[int], rng: np.random.Generator, *, length: int, depth: float, digits: int = 5
) -> TextNeedle:
    """Hide one number in text.

    Args:
        tokenizer: encodes the sentences.
        hay: ids of real text, at least `length` of them (repeated if fewer).
        rng: chooses the number.
        length: tokens of the prompt, exactly (ConfigError if the sentences alone are longer).
        depth: position of the fact in [0, 1].
        digits: of the number.
    """
    number = "".join(map(str, rng.integers(10, size=digits)))
    fact = tokenizer.encode(f"\n# The access code of the lunar station is {number}.\n")
    question = tokenizer.encode("\n# The access code of the lunar station is ")
    room = length - len(fact) - len(question)
    require(room >= 0, "needle in text", length, length - room)
    filler = (list(hay) * (room // max(1, len(hay)) + 1))[:room]
    at = round(depth * room)
    return TextNeedle(filler[:at] + fact + filler[at:] + question, tokenizer.encode(number), depth)
