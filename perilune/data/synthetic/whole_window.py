"""Tasks that take the whole window to solve (report §3.4: sub-tasks permuted and concatenated over the full length).

Several sub-tasks put their evidence into one window. The pieces of all of them are shuffled together and spread evenly
over its length with filler between; the questions follow at the end, shuffled too. One sub-task asks for single facts,
one for the end of a chain of facts (each link anywhere in the window), one for a sum over scattered numbers, so that no
part of the window can be skipped and nothing can be answered before its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perilune.data.synthetic.task import Example, answer_next, require

_FACT, _LINK, _COUNT, _ASK = range(4)


@dataclass(frozen=True)
class WholeWindow:
    """Evidence pieces `kind a b` and questions `? kind a answer`.

    Attributes: hay, names = alphabet sizes (names are also values); facts, chains, hops, addends = amounts a window;
    modulus = of the sum (at most `names`).
    """

    hay: int = 16
    names: int = 64
    facts: int = 4
    chains: int = 2
    hops: int = 3
    addends: int = 6
    modulus: int = 10
    name: str = "whole_window"

    @property
    def symbols(self) -> int:
        """Hay, names, three kinds and `?`."""
        return self.hay + self.names + 4

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """Pieces stand at equal distances; 4-token questions fill the end."""
        pieces, questions = self._subtasks(rng)
        need = 3 * len(pieces) + 4 * len(questions)
        require(length >= need, self.name, length, need)
        body = length - 4 * len(questions)
        ids = rng.integers(self.hay, size=length).astype(np.int64)
        answer = np.zeros(length, dtype=np.bool_)
        for slot, piece in enumerate(rng.permutation(len(pieces))):
            at = slot * body // len(pieces)
            ids[at : at + 3] = pieces[piece]
        for slot, question in enumerate(rng.permutation(len(questions))):
            at = body + 4 * slot
            ids[at : at + 4] = questions[question]
            answer[at + 3] = True
        return answer_next(ids, answer)

    def _subtasks(self, rng: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:
        kind = self.hay + self.names
        ask = kind + _ASK
        names = iter((self.hay + rng.permutation(self.names)).tolist())
        pieces: list[list[int]] = []
        questions: list[list[int]] = []
        for _ in range(self.facts):
            subject, value = next(names), self.hay + int(rng.integers(self.names))
            pieces.append([kind + _FACT, subject, value])
            questions.append([ask, kind + _FACT, subject, value])
        for _ in range(self.chains):
            chain = [next(names) for _ in range(self.hops + 1)]
            pieces += [[kind + _LINK, a, b] for a, b in zip(chain, chain[1:])]
            questions.append([ask, kind + _LINK, chain[0], chain[-1]])
        total, label = 0, next(names)
        for number in rng.integers(self.modulus, size=self.addends).tolist():
            total += number
            pieces.append([kind + _COUNT, label, self.hay + number])
        questions.append([ask, kind + _COUNT, label, self.hay + total % self.modulus])
        return pieces, questions
