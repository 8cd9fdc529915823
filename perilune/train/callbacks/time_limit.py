"""A run that must end in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perilune.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer


class TimeLimit(Callback):
    """Stops after `config.time_limit` seconds of training steps, those of earlier processes of the run included."""

    def on_start(self, trainer: Trainer) -> None:
        """A resumed run may have used its time already."""
        self._check(trainer)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Stop once the time is used up."""
        self._check(trainer)

    @staticmethod
    def _check(trainer: Trainer) -> None:
        limit = trainer.config.time_limit
        if limit and trainer.seconds >= limit and trainer.step < trainer.config.steps and trainer.stop_reason is None:
            trainer.stop_reason = "time_limit"
