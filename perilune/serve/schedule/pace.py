"""How many tokens of long prompts a step may hold while short ones keep coming.

A short prompt that arrives waits for the step under way. What that costs depends on model and machine: on a GPU 64 and
512 tokens take about as long, on a CPU the latter take four times as long. So it is measured: a piece of a long prompt is made
to take about as long as a step with short ones. Such a step holds no piece, or short prompts that arrive during it would
wait for both; only every fourth one does, so that long prompts go on. The first token of a short prompt is then out after
two such times or so.
"""

from __future__ import annotations

from math import inf

RECENT = 256  # steps with prompts for which short prompts are expected again after the last one
WAIT = 3  # steps with short prompts in a row that long ones wait for
LEAST = 64  # tokens of a piece; shorter ones would take hardly less time
# Times of a short step that a piece may take; with exactly one, a fixed cost of every step would make pieces ever shorter.
PATIENCE = 1.25
_NEW = 0.2  # weight of a new measurement


class Pace:
    """What the engine has learned of its own speed.

    Attributes:
        tokens: of long prompts in a step; infinite until something was measured.
    """

    def __init__(self) -> None:
        self.tokens = inf
        self._short: float | None = None
        self._since = RECENT
        self._waited = 0

    def planned(self, *, short: bool) -> bool:
        """A step with prompts is planned; `short`: others than long ones are at work. Returns whether the long ones wait."""
        self._since = 0 if short else self._since + 1
        self._waited = self._waited + 1 if short and self._waited < WAIT else 0
        return self._waited > 0

    @property
    def expects_short(self) -> bool:
        """Whether short prompts have come of late, and so will others."""
        return self._since < RECENT

    @property
    def most(self) -> float:
        """Tokens of long prompts that the next step may hold."""
        return self.tokens if self.expects_short else inf

    def short_took(self, seconds: float) -> None:
        """Decoding and short prompts of a step took so long."""
        self._short = seconds if self._short is None else self._short + _NEW * (seconds - self._short)

    def long_took(self, tokens: int, seconds: float) -> None:
        """Pieces of long prompts took so long; the next ones are made longer or shorter, but not by much at once."""
        if self._short is not None and seconds > 0:
            wanted = tokens * min(1.5, max(0.5, PATIENCE * self._short / seconds))
            self.tokens = max(LEAST, wanted if self.tokens == inf else self.tokens + 0.5 * (wanted - self.tokens))
