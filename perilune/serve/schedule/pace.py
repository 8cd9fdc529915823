"""How many tokens of longer prompts a step may hold while short ones keep coming.

A short prompt that arrives waits for the step under way. What that costs depends on model and machine: on a GPU 64 and
512 tokens take about as long, on a CPU the latter take four times as long. So it is measured: a piece of a longer prompt is
made to take `patience` times as long as a step with short ones. Such a step holds no piece, or short prompts that arrive
during it would wait for both; only every fourth one does, so that longer prompts go on. The first token of a short prompt is
then out after one such time and `patience` of them, or so.

Patience is a trade. Every pass has a cost that does not depend on its tokens, so small pieces make a long prompt slow. In
virtual time, where a step takes 9 ms and 0.1 ms a token (a small model on two CPU cores), with short prompts of 60 tokens
that arrive at random every eight times their own step and two prompts of 3000 tokens always at work
(`tests/serve/test_pace.py`):

    patience                       1.0    1.25   1.5    1.75   2.0    3.0    one queue
    99th percentile / idle         1.23   1.32   1.45   1.61   1.75   2.39   26
    time of the long ones / alone  2.19   1.75   1.51   1.38   1.29   1.13   1

Answers behind the short prompts, arrivals three times as dense or in pairs, and passes that cost 3 ms and 0.2 ms a token
give 1.57 to 1.91 times idle with 1.75, and up to 2.15 with 2.
"""

from __future__ import annotations

from math import inf

RECENT = 256  # steps with prompts for which short prompts are expected again after the last one
WAIT = 3  # steps with short prompts in a row that longer ones wait for
LEAST = 64  # tokens of a piece; shorter ones would take hardly less time
PATIENCE = 1.75  # times of a short step that a piece may take
_NEW = 0.2  # weight of a new measurement


class Pace:
    """What the engine has learned of its own speed.

    Args:
        patience: times of a step with short prompts that a piece of longer ones may take.

    Attributes:
        tokens: of longer prompts in a step; infinite until something was measured.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.tokens = inf
        self._short: float | None = None
        self._since = RECENT
        self._waited = 0

    def planned(self, *, short: bool) -> bool:
        """A step with prompts is planned; `short`: short ones are at work. Returns whether the longer ones wait."""
        self._since = 0 if short else self._since + 1
        self._waited = self._waited + 1 if short and self._waited < WAIT else 0
        return self._waited > 0

    @property
    def expects_short(self) -> bool:
        """Whether short prompts have come of late, and so will others."""
        return self._since < RECENT

    @property
    def most(self) -> float:
        """Tokens of longer prompts that the next step may hold."""
        return self.tokens if self.expects_short else inf

    def short_took(self, seconds: float) -> None:
        """Decoding and short prompts of a step took so long."""
        self._short = seconds if self._short is None else self._short + _NEW * (seconds - self._short)

    def long_took(self, tokens: int, seconds: float) -> None:
        """Pieces of longer prompts took so long; the next ones are made longer or shorter, but not by much at once."""
        if self._short is not None and seconds > 0:
            wanted = tokens * min(1.5, max(0.5, self.patience * self._short / seconds))
            self.tokens = max(LEAST, wanted if self.tokens == inf else self.tokens + 0.5 * (wanted - self.tokens))
