"""What a callback is: something that happens beside the steps, in its own file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer


class Callback:
    """Hooks around the steps. A hook may read the trainer, and may set `trainer.stop_reason` to end after this step; it
    must not draw from the global random generators, so that a run with it equals one without it."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this process, with a checkpoint already loaded if there is one."""

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """After each step and before its checkpoint; `record` is the step's "train" record."""

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """After any record was made: train, eval, sample."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step of this process and its checkpoint, whatever ended it, except an error."""

    def on_close(self, trainer: Trainer) -> None:
        """At the very end, also after an error."""
