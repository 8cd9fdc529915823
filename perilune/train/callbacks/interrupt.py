"""Ctrl-C, SIGTERM and a closed terminal end a run after its current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from perilune.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt(Callback):
    """The first signal asks the run to stop and save; a second one, or one after the last save, interrupts at once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def on_start(self, trainer: Trainer) -> None:
        """Take the signals over (only the main thread may)."""
        if threading.current_thread() is not threading.main_thread():
            return

        def ask(number: int, _frame: Any) -> None:
            if trainer.stop_reason == "interrupt" or trainer.saved_at_end:
                raise KeyboardInterrupt
            trainer.stop_reason = "interrupt"
            trainer.log.warning("%s: finishing this step, then saving", signal.Signals(number).name)

        # Under nohup the terminal may close: SIGHUP is ignored already, and stays so.
        kept = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ()
        self._before = {number: signal.signal(number, ask) for number in _SIGNALS if number not in kept}

    def on_close(self, trainer: Trainer) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
