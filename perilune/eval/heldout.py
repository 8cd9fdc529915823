"""Bits per byte of a finished run on the text that it never saw."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from perilune.errors import CheckpointError
from perilune.loading import LoadedRun, load_run
from perilune.rundir import RunDir
from perilune.train.heldout import HeldOutResult, score_held_out
from perilune.train.precision import resolve_device, resolve_precision, set_threads
from perilune.train.run_data import open_data

log = logging.getLogger("perilune.eval")


def load_for_eval(name_or_path: str | Path, step: int | None = None, device: str | None = None) -> LoadedRun:
    """A run's model where it is to be scored, in the precision and with the threads that it was trained with.

    Args:
        name_or_path, step, device: see `evaluate_run`.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged.
    """
    loaded = load_run(name_or_path, step=step)
    place: torch.device = resolve_device(device or loaded.config.device)
    set_threads(loaded.config)
    loaded.model.compute_dtype = resolve_precision(loaded.config.precision, place).dtype
    return loaded._replace(model=loaded.model.to(place))


def evaluate_run(
    name_or_path: str | Path, *, step: int | None = None, max_tokens: int = 0, device: str | None = None
) -> HeldOutResult:
    """Score a run's held-out text with one of its checkpoints.

    Args:
        name_or_path: a run under `runs/`, or its folder.
        step: which checkpoint; None = the newest whole one.
        max_tokens: about this many tokens; 0 = all of the held-out text.
        device: auto | cpu | cuda; None = as the run was trained.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged.
        RequestError: the run's text cannot be read any more.
    """
    loaded = load_for_eval(name_or_path, step, device)
    run = RunDir.resolve(name_or_path)
    data = open_data(loaded.config, run)
    _warn_of_other_text(run, data.held_out.fingerprint)
    return score_held_out(loaded.model, data.held_out, data.token_bytes, max_tokens=max_tokens)


def _warn_of_other_text(run: RunDir, fingerprint: str) -> None:
    """Log a warning if the files changed since the run began: then other documents are held out, perhaps trained ones."""
    try:
        told = run.read_json("split.json")["held_out"]["fingerprint"]
    except (CheckpointError, KeyError, TypeError):
        return  # an older run, or a converted one that has no text of its own
    if told != fingerprint:
        log.warning(
            "the held-out text is not the one that %s began with (its files changed, see %s): the score cannot be compared with "
            "earlier ones, and text that was trained on may be in it",
            run.path, run.path / "split.json",
        )  # fmt: skip
