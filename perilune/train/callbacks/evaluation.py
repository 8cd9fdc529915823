"""Bits per byte on held-out text, every few steps on a part and at the end on all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perilune.train.callbacks.callback import Callback
from perilune.train.heldout import score_held_out

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer


class Evaluation(Callback):
    """Scores held-out text as `config.eval` says; the last result is `trainer.held_out`."""

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Score a part every N steps, but not where the end scores more."""
        every = trainer.config.eval.every
        if every and trainer.step % every == 0 and trainer.step < trainer.config.steps and not trainer.stop_reason:
            self._score(trainer, trainer.config.eval.tokens)

    def on_end(self, trainer: Trainer) -> None:
        """Score the final part, unless the user is waiting for an interrupted run to end."""
        if trainer.stop_reason != "interrupt":
            self._score(trainer, trainer.config.eval.final_tokens)

    @staticmethod
    def _score(trainer: Trainer, max_tokens: int) -> None:
        data = trainer.data
        result = score_held_out(trainer.model, data.held_out, data.token_bytes, max_tokens=max_tokens)
        trainer.held_out = result
        trainer.record(
            {
                "kind": "eval",
                "step": trainer.step,
                "bits_per_byte": result.bits_per_byte,
                "nats": result.nats,
                "bytes": result.bytes,
                "tokens": result.tokens,
                "seconds": result.seconds,
            }
        )
