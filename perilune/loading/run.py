"""A trained run, or a published checkpoint, as objects: model, tokenizer, configuration."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from perilune import checkpoint
from perilune.errors import CheckpointError
from perilune.loading.loaded import LoadedRun
from perilune.loading.published import load_published
from perilune.model.hf import is_published
from perilune.model.transformer import Transformer
from perilune.quant import apply_qat, quantize_experts
from perilune.rundir import RunDir
from perilune.tokenizer import load_tokenizer

log = logging.getLogger("perilune.loading")


def load_run(name_or_path: str | Path, device: torch.device | str = "cpu", step: int | None = None) -> LoadedRun:
    """Load a run's weights from a checkpoint whose files were verified; the model is in evaluation mode, in fp32.

    Args:
        name_or_path: a run under `runs/`, its folder, or the folder of a published checkpoint.
        device: where the model goes.
        step: which checkpoint; None = the newest whole one. A published checkpoint has no steps.

    Raises:
        ConfigError: the config.json of a published checkpoint is not understood.
        CheckpointError: no such run or checkpoint, or it is damaged, or its parts do not fit each other.
    """
    run = RunDir.resolve(name_or_path)
    if not run.exists() and is_published(Path(name_or_path)):
        if step is not None:
            raise CheckpointError(f"{name_or_path} is a published checkpoint: it has no step {step}; leave --step out")
        return load_published(name_or_path, device)
    config = run.read_config()
    folder = checkpoint_folder(run, step)
    ranks = run.path / "tiktoken.model"  # what a run converted from a published checkpoint may have instead
    if not run.tokenizer_path.exists() and not ranks.exists():
        raise CheckpointError(f"{run.path} has no tokenizer.json; put it back from a copy of the run")
    tokenizer = load_tokenizer(run.tokenizer_path if run.tokenizer_path.exists() else run.path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise CheckpointError(
            f"vocabulary mismatch: {run.tokenizer_path} has {tokenizer.vocab_size} ids, the model of {run.path} only "
            f"{config.model.vocab_size}; put the run's own tokenizer.json back"
        )
    model = Transformer(config.model)
    checkpoint.load_model(folder, model)
    # A quantised run computes here as it did in training: weights rounded once, inputs in every product.
    if config.quant.weights == "mxfp4":
        quantize_experts(model, config.quant.rule)
    apply_qat(model, replace(config.quant, weights="none"))
    return LoadedRun(model.to(device).eval(), tokenizer, config)


def checkpoint_folder(run: RunDir, step: int | None) -> Path:
    """Folder of a run's checkpoint of `step`, or of its newest whole one; its files were verified.

    A newer one that is damaged is passed over, which is logged.

    Raises:
        CheckpointError: there is none, or the one of `step` is damaged.
    """
    known = [number for number, _ in run.checkpoints()]
    if step is not None:
        if not run.checkpoint_path(step).is_dir():
            shown = ", ".join(map(str, known)) or "none"
            raise CheckpointError(f"{run.path} has no checkpoint of step {step}; there are: {shown}")
        checkpoint.verified(run.checkpoint_path(step))
        return run.checkpoint_path(step)
    folder, refused = checkpoint.newest(run)
    for reason in refused if folder is not None else ():
        log.warning("%s; %s is used instead", reason, folder)
    if folder is None:
        why = f": {refused[0]}" if refused else " yet; train it first, or wait for its first checkpoint"
        raise CheckpointError(f"{run.path} has no whole checkpoint{why}")
    return folder


def newest_step(run: RunDir) -> int:
    """Step of a run's newest whole checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    return checkpoint.read_index(checkpoint_folder(run, None))["step"]
