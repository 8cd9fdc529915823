"""Stages of window length (report §3.4: 8K, 64K, 256K, 1M): longer windows, fewer of them, the same tokens a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step lies: stage number, window length, step within the stage."""

    stage: int
    seq_len: int
    stage_step: int


class Curriculum:
    """Which window length each step uses.

    Attributes:
        first_steps: the step at which each stage begins.
        seq_lens: its window length.
        tokens_per_step: constant over all stages.
    """

    def __init__(self, stages: Sequence[tuple[int, float]], *, steps: int, tokens_per_step: int) -> None:
        """Lay out the stages.

        Args:
            stages: (window length, fraction of all steps) in order; fractions sum to 1.
            steps: steps in all; a stage begins at the step nearest to its fraction. The last one has no end.
            tokens_per_step: a multiple of every window length (ConfigError otherwise).
        """
        for seq_len, _ in stages:
            if tokens_per_step % seq_len:
                raise ConfigError(
                    f"tokens_per_step={tokens_per_step} is not a multiple of the window seq_len={seq_len}"
                )
        self.seq_lens = tuple(seq_len for seq_len, _ in stages)
        self.tokens_per_step = tokens_per_step
        done, firsts = 0.0, []
        for _, fraction in stages:
            firsts.append(round(done * steps))
            done += fraction
        self.first_steps = tuple(firsts)

    def locate(self, step: int) -> Place:
        """The place of a step, counted from 0. A stage too short to have a step is never entered."""
        stage = max(index for index, first in enumerate(self.first_steps) if first <= step)
        return Place(stage, self.seq_lens[stage], step - self.first_steps[stage])

    def rows(self, place: Place) -> int:
        """Windows of one step, over all ranks."""
        return self.tokens_per_step // place.seq_len
