"""Probes: arrays from inside the model, every few steps and at the end, in probes/step-%08d.npz."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.model.probe import probe
from perilune.ops.segments import Segments
from perilune.rundir import write_atomic
from perilune.train.callbacks.callback import Callback
from perilune.train.step import split_rows

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer


class Probes(Callback):
    """Runs the model once, without training, on the text of the first micro-batch of the run's data order."""

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Probe after every N-th step."""
        every = trainer.config.probe_every
        if every and trainer.step % every == 0 and trainer.step < trainer.config.steps:
            self._write(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Probe the trained model."""
        if trainer.stop_reason != "interrupt":
            self._write(trainer)

    @staticmethod
    def _write(trainer: Trainer) -> None:
        batch = split_rows(trainer.data.loader.batch(0).without_images(), trainer.config.microbatch_tokens)[0]
        device = trainer.model.device
        segments = Segments.from_starts(batch.starts_BT.to(device))
        found = probe(trainer.model, batch.ids_BT.to(device), segments)
        arrays = {key: np.array(v) if isinstance(v, list) else v.cpu().numpy() for key, v in found.items()}
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomic(trainer.run.path / "probes" / f"step-{trainer.step:08d}.npz", content.getvalue())
