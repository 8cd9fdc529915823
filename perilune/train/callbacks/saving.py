"""Checkpoints every few steps, and at the end of whatever ended the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perilune.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer


class Saving(Callback):
    """Saves as `config.checkpoint` says. The trainer calls it after all others on a step, so that whatever a step wrote
    is in the run before the checkpoint from which a later run goes on, and before all others at the end."""

    def on_start(self, trainer: Trainer) -> None:
        """Remember what is on disk already."""
        self._saved = trainer.step if trainer.run.latest_checkpoint() else -1

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Save after every N-th step."""
        every = trainer.config.checkpoint.every
        if every and trainer.step % every == 0:
            self._save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Save unless this step is saved."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._saved != trainer.step:
            trainer.save()
            self._saved = trainer.step
