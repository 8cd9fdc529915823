"""Going on with a run: what may change, which checkpoint counts, and everything it restores."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from perilune import checkpoint
from perilune.config.parse import to_dict
from perilune.config.train import TrainConfig
from perilune.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer

log = logging.getLogger("perilune.train")

# Settings that do not enter the computation of a step.
FREE = ("checkpoint", "cuda_graphs", "eval", "log_every", "probe_every", "time_limit")


def check_same(old: TrainConfig, new: TrainConfig) -> None:
    """Refuse to go on under a configuration that would make the run another one.

    Raises:
        ConfigError: lists each setting that differs, with both values.
    """

    def flat(value: Any, path: str = "") -> dict[str, Any]:
        if isinstance(value, dict):
            return {
                k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}" if path else key).items()
            }
        return {path: value}

    a, b = flat(to_dict(old)), flat(to_dict(new))
    changed = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key) and key.split(".")[0] not in FREE]
    if changed:
        shown = "; ".join(f"{key}: the run has {a.get(key)!r}, now {b.get(key)!r}" for key in changed[:6])
        raise ConfigError(
            f"a resumed run keeps its configuration, but {shown}{f'; and {len(changed) - 6} more' if len(changed) > 6 else ''}. "
            f"Leave these out to resume, or start another --run. May change: {', '.join(FREE)}"
        )


def generator_states() -> dict[str, Tensor]:
    """States of torch's global generators, as tensors for a checkpoint."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_generators(tensors: dict[str, Tensor]) -> None:
    """Put the generators back where a checkpoint had them."""
    torch.set_rng_state(tensors["rng.cpu"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"rng.cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng.cuda.{i}"], i)


def restore(trainer: Trainer) -> None:
    """Load the run's newest whole checkpoint into a fresh trainer; without any, the run begins at step 0.

    A damaged checkpoint is named and passed over for the one before it.

    Raises:
        CheckpointError: every checkpoint is damaged, or the newest whole one belongs to another model, tokenizer or data.
    """
    run = trainer.run
    for stale in checkpoint.clean(run):
        log.info("removed %s, left by a save that was killed", stale.name)
    folder, refused = checkpoint.newest(run)
    for reason in refused:
        log.warning("%s", reason)
    if folder is None:
        if refused:
            raise CheckpointError(f"no whole checkpoint in {run.checkpoints_path}: {refused[0]}")
        log.warning("no checkpoint in %s yet: starting at step 0", run.path)
        run.truncate_metrics(0)
        return
    index = checkpoint.read_index(folder)
    state = index["state"]
    _check_origin(trainer, str(folder), state)
    checkpoint.load_model(folder, trainer.model)
    tensors = checkpoint.read_tensors(folder, "optimizer")
    trainer.optimizer.load_state_tensors({k: t for k, t in tensors.items() if k.startswith(("muon.", "adamw."))})
    trainer.routing.load_state_tensors(tensors)
    restore_generators(tensors)
    trainer.step, trainer.tokens, trainer.seconds = index["step"], state["tokens"], state["seconds"]
    trainer.loss_first, trainer.loss_last = state["loss_first"], state["loss_last"]
    run.truncate_metrics(trainer.step)
    log.info("continuing %s from step %d", run.path, trainer.step)


def _check_origin(trainer: Trainer, folder: str, state: dict[str, Any]) -> None:
    own, theirs = trainer.data.tokenizer, state["tokenizer"]
    if own.fingerprint != theirs["fingerprint"]:
        raise CheckpointError(
            f"vocabulary mismatch: {folder} was trained with another tokenizer ({theirs['vocab_size']} ids, "
            f"{theirs['fingerprint'][:12]}…) than {trainer.run.tokenizer_path} holds ({own.vocab_size} ids, "
            f"{own.fingerprint[:12]}…); put the old tokenizer.json back, or start another --run"
        )
    if trainer.data.loader.fingerprint != state["loader"]["fingerprint"]:
        raise CheckpointError(
            f"the training text is not the one that {folder} was trained on (data fingerprint "
            f"{trainer.data.loader.fingerprint[:12]}… instead of {state['loader']['fingerprint'][:12]}…); restore the "
            "files, or start another --run"
        )
