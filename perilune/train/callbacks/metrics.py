"""metrics.jsonl: every record of the run, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perilune.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer


class Metrics(Callback):
    """Appends records to the run's metrics; train records every `log_every` steps, the first and the last."""

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Append the record."""
        every = trainer.config.log_every
        step = record["step"]
        if record["kind"] == "train" and step % every and step not in (1, trainer.config.steps):
            return
        trainer.run.append_metrics(record)
