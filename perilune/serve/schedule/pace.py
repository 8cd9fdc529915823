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

Passes with longer prompts may cost far more whatever they hold: on a GPU they are not recorded behind much. Smaller pieces do not
make them shorter then, they only make the prompt slow. So what does not depend on the tokens is measured too, and a piece may
always take `WORTH` times that.
"""

from __future__ import annotations

from math import inf

RECENT = 256  # steps with prompts for which short prompts are expected again after the last one
WAIT = 3  # steps with short prompts in a row that longer ones wait for
LEAST = 64  # tokens of a piece, those of a chunk of the recurrence's kernels; shorter ones would take hardly less time
PATIENCE = 1.75  # times of a short step that a piece may take
WORTH = 1.5  # times of what a piece without tokens would cost: what one may take in any case
_NEW = 0.2  # weight of a new measurement


class _FixedCost:
    """What pieces cost that does not depend on their tokens: the line through those of late, at no tokens.

    Attributes:
        seconds: the estimate; 0 until pieces of different lengths were seen.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._tokens: float | None = None  # means, and what goes with them, of pieces of late
        self._took = self._square = self._product = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """A piece of so many tokens took so long."""
        if self._tokens is None:
            self._tokens, self._took = float(tokens), seconds
            return
        off, late = tokens - self._tokens, seconds - self._took
        self._tokens += _NEW * off
        self._took += _NEW * late
        self._square = (1 - _NEW) * (self._square + _NEW * off * off)
        self._product = (1 - _NEW) * (self._product + _NEW * off * late)
        if self._square > (0.1 * self._tokens) ** 2:  # else nothing but noise tells them apart
            each = max(0.0, self._product / self._square)
            self.seconds = min(self._took, max(0.0, self._took - each * self._tokens))


class Pace:
    """What the engine has learned of its own speed.

    Args:
        patience: times of a step with short prompts that a piece of longer ones may take.

    Attributes:
        tokens: of longer prompts in a step; infinite until something was measured.
        turns: steps with prompts for which longer ones did not have to wait: their classes go first in turn.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.tokens = inf
        self.turns = 0
        self._short: float | None = None
        self._fixed = _FixedCost()
        self._since = RECENT
        self._waited = 0

    def planned(self, *, short: bool) -> bool:
        """A step with prompts is planned; `short`: short ones are at work. Returns whether the longer ones wait."""
        self._since = 0 if short else self._since + 1
        self._waited = self._waited + 1 if short and self._waited < WAIT else 0
        self.turns += self._waited == 0
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
            self._fixed.saw(tokens, seconds)
            allowed = max(self.patience * self._short, WORTH * self._fixed.seconds)
            wanted = tokens * min(1.5, max(0.5, allowed / seconds))
            self.tokens = max(LEAST, wanted if self.tokens == inf else self.tokens + 0.5 * (wanted - self.tokens))
