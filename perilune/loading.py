"""A trained run as objects: model, tokenizer, configuration."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from perilune import checkpoint
from perilune.config.train import TrainConfig
from perilune.errors import CheckpointError
from perilune.model.transformer import Transformer
from perilune.rundir import RunDir
from perilune.tokenizer import Tokenizer, load_tokenizer


class LoadedRun(NamedTuple):
    """What `load_run` returns."""

    model: Transformer
    tokenizer: Tokenizer
    config: TrainConfig


def load_run(name_or_path: str | Path, device: torch.device | str = "cpu", step: int | None = None) -> LoadedRun:
    """Load a run's weights from a checkpoint whose files were verified; the model is in evaluation mode, in fp32.

    Args:
        name_or_path: a run under `runs/`, or its folder.
        device: where the model goes.
        step: which checkpoint; None = the newest whole one.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged, or its parts do not fit each other.
    """
    run = RunDir.resolve(name_or_path)
    config = run.read_config()
    folder = _folder(run, step)
    checkpoint.verified(folder)
    if not run.tokenizer_path.exists():
        raise CheckpointError(f"{run.path} has no tokenizer.json; put it back from a copy of the run")
    tokenizer = load_tokenizer(run.tokenizer_path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise CheckpointError(
            f"vocabulary mismatch: {run.tokenizer_path} has {tokenizer.vocab_size} ids, the model of {run.path} only "
            f"{config.model.vocab_size}; put the run's own tokenizer.json back"
        )
    model = Transformer(config.model)
    checkpoint.load_model(folder, model)
    return LoadedRun(model.to(device).eval(), tokenizer, config)


def _folder(run: RunDir, step: int | None) -> Path:
    known = [number for number, _ in run.checkpoints()]
    if step is not None:
        if not run.checkpoint_path(step).is_dir():
            shown = ", ".join(map(str, known)) or "none"
            raise CheckpointError(f"{run.path} has no checkpoint of step {step}; there are: {shown}")
        return run.checkpoint_path(step)
    folder, refused = checkpoint.newest(run)
    if folder is None:
        why = f": {refused[0]}" if refused else " yet; train it first, or wait for its first checkpoint"
        raise CheckpointError(f"{run.path} has no whole checkpoint{why}")
    return folder
