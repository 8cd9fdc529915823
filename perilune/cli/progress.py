"""The progress line of a training run: loss, bits per byte, speed, time left, utilisation."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from perilune.train.callbacks.callback import Callback
from perilune.train.trainer import Trainer

PLAIN_EVERY = 10.0
"""Seconds between lines where stderr is not a terminal."""


class ProgressLine(Callback):
    """A live line on a terminal; elsewhere a plain line now and then. All of it goes to stderr.

    A stderr that nobody reads any more (`2>&1 | head`, a closed terminal) ends the telling, never the run.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live: Any = None
        self._task: Any = None
        self._speed = 0.0
        self._last_line = -PLAIN_EVERY
        self._heard = True

    def on_start(self, trainer: Trainer) -> None:
        """Say what trains on what, and open the line."""
        model, data = trainer.config.model, trainer.data
        count = sum(p.numel() for p in trainer.model.parameters())
        self._say(
            f"{count / 1e6:.2f} M parameters, {model.num_layers} layers of width {model.hidden_size}, "
            f"{data.tokenizer.vocab_size:,} token ids; {data.prepared.train.num_tokens:,} training and "
            f"{data.held_out.num_tokens:,} held-out tokens"
        )
        self._say(
            f"{trainer.device.type}, {trainer.threads} threads, {str(trainer.precision.dtype).removeprefix('torch.')} "
            f"({trainer.precision.reason}), matmul peak {trainer.peak / 1e9:,.0f} GFLOP/s → {trainer.run.path}"
        )
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._live = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"),
                TextColumn("eta"), TimeRemainingColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._live.add_task("", total=trainer.config.steps, completed=trainer.step)
            self._tell(self._live.start)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Move the line on."""
        speed = record["tokens_per_second"]
        self._speed = speed if not self._speed else 0.9 * self._speed + 0.1 * speed
        parts = [f"loss {record['loss']:.3f}"]
        if trainer.held_out:
            parts.append(f"held-out {trainer.held_out.bits_per_byte:.3f} bits/byte")
        share = record["mfu"] * self._speed / speed
        parts += [f"{self._speed:,.0f} tokens/s", f"MFU {share:.1%}"]
        text = "  ".join(parts)
        if self._live is not None:
            update = functools.partial(self._live.update, self._task, completed=trainer.step, description=text)
            self._tell(update)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_EVERY or trainer.step == trainer.config.steps:
            self._last_line = now
            left = (trainer.config.steps - trainer.step) * trainer.config.tokens_per_step / self._speed
            self._say(f"step {trainer.step}/{trainer.config.steps}  {text}  eta {left:,.0f} s")

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Mention an evaluation."""
        if record["kind"] == "eval":
            self._say(
                f"step {record['step']}: {record['bits_per_byte']:.4f} bits/byte on {record['bytes']:,} held-out bytes "
                f"({record['seconds']:.1f} s)"
            )

    def on_end(self, trainer: Trainer) -> None:
        """Close the line."""
        self._close()

    def on_close(self, trainer: Trainer) -> None:
        """Close the line after an error too."""
        self._close()

    def _close(self) -> None:
        if self._live is not None:
            self._tell(self._live.stop)
            self._live = None

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._tell(lambda: self._console.print(text, highlight=False))
        else:
            self._tell(lambda: print(text, file=sys.stderr, flush=True))

    def _tell(self, write: Callable[[], Any]) -> None:
        if self._heard:
            try:
                write()
            except OSError:
                self._heard = False
