"""Which states are kept for later requests: one policy, and the points of a chunk where it wants a checkpoint.

A checkpoint costs as many bytes as thousands of cached tokens, so there cannot be one at every hash unit. Prompts fork and
grow at few places, and every policy below is a guess where:

- every policy but `dense`: the last unit of each forward pass, recycled when the next pass has one (report §5.4.1); so an
  aborted or preempted request can go on; the last unit below the end of a prompt (*tail*), for the same prompt again; and
  the last unit of the reply so far (*decode*), for the next turn. `tail` has only these.
- `turns`: also the last unit of each message, for branches and edits of a conversation (report §5.4.1).
- `second-hit`: also the end of a prefix that is seen again with its pages, but no states, in the cache (Marconi's rule).
- `interval:N`: also every N tokens.
- `dense`: every unit.

What another engine or tier sent has the reason *import*. Policies add up: `turns+second-hit` is the default.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from perilune.errors import ConfigError

ROLLING, DECODE, TAIL, TURN, JUNCTION, INTERVAL, DENSE, IMPORT = REASONS = (
    "rolling", "decode", "tail", "turn", "junction", "interval", "dense", "import"
)  # fmt: skip
RECYCLED = (ROLLING, DECODE)  # superseded by the request's next one
POLICIES = ("dense", "tail", "turns", "second-hit", "interval:N")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Where checkpoints are taken.

    Attributes:
        turns: at the end of each message.
        second_hit: where a prefix is seen again.
        interval: every so many tokens; 0 = not.
        dense: at every hash unit.
    """

    turns: bool = True
    second_hit: bool = True
    interval: int = 0
    dense: bool = False

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ConfigError(f"retention interval:{self.interval} must be at least 1 token")

    @staticmethod
    def parse(text: str) -> Retention:
        """Read `dense`, `tail`, `turns`, `second-hit`, `interval:N`, or several joined by `+`.

        Raises:
            ConfigError: anything else.
        """
        chosen = {"turns": False, "second_hit": False, "dense": False, "interval": 0}
        for word in text.split("+"):
            name, _, number = word.strip().partition(":")
            if name == "interval" and number.isdecimal() and int(number) > 0:
                chosen["interval"] = int(number)
            elif word.strip() in ("dense", "turns", "second-hit"):
                chosen[name.replace("-", "_")] = True
            elif word.strip() != "tail":
                raise ConfigError(
                    f"retention {word.strip()!r} is not known; allowed: {', '.join(POLICIES)} (N tokens), "
                    "or several joined by +"
                )
        return Retention(**chosen)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        words = ["dense"] * self.dense + ["turns"] * self.turns + ["second-hit"] * self.second_hit
        return "+".join(words + [f"interval:{self.interval}"] * bool(self.interval)) or "tail"

    def points(
        self, start: int, end: int, *, unit: int, prompt: int, turn_ends: Sequence[int], junction: int
    ) -> list[tuple[int, str]]:
        """Where in a chunk states are to be written, with the reasons; the ones that matter most come first.

        Args:
            start, end: tokens before and behind the chunk.
            unit: tokens of a hash unit.
            prompt: tokens of the prompt.
            turn_ends: tokens before the end of each message, ascending.
            junction: end of the prefix that is seen again; 0 = none.
        """
        chosen: dict[int, str] = {}
        tail = (prompt - 1) // unit * unit
        if start < tail <= end:
            chosen[tail] = TAIL
        if self.turns:
            # A message that ends up to a unit behind the chunk's end has its last whole unit in the chunk.
            first, last = bisect_right(turn_ends, start), bisect_left(turn_ends, end + unit)
            for turn in turn_ends[first:last]:
                point = turn // unit * unit
                if start < point <= end:
                    chosen.setdefault(point, TURN)
        if self.second_hit and start < junction <= end:
            chosen.setdefault(junction, JUNCTION)
        if self.interval:
            # Rounded down to units, so an interval that is no multiple of them stays near its grid.
            for number in range(start // self.interval, end // self.interval + 2):
                point = number * self.interval // unit * unit
                if start < point <= end:
                    chosen.setdefault(point, INTERVAL)
        if self.dense:
            for point in range(start // unit * unit + unit, end + 1, unit):
                chosen.setdefault(point, DENSE)
        last_unit = end // unit * unit
        if last_unit > start:
            chosen.setdefault(last_unit, DECODE if last_unit >= prompt else ROLLING)
        return list(chosen.items())
