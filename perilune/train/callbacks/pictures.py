"""What the model pays for the answers about pictures that it never saw, beside every evaluation on text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from perilune.data.loader import Batch
from perilune.train.callbacks.callback import Callback
from perilune.train.step import batch_loss

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer

DOCUMENTS = 64


class Pictures(Callback):
    """Scores the same held-out pictures each time; does nothing in a run without pictures."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Follow an evaluation."""
        if record["kind"] != "eval" or trainer.data.pictures is None:
            return
        if self._batch is None:
            self._batch = trainer.data.pictures.held_out(DOCUMENTS)
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            with torch.no_grad():
                loss = batch_loss(trainer.model, self._batch)
        finally:
            trainer.model.train(was_training)
        trainer.record(
            {
                "kind": "eval_pictures",
                "step": trainer.step,
                "nats_per_token": float(loss.nats) / loss.tokens,
                "tokens": loss.tokens,
                "pictures": DOCUMENTS,
            }
        )
