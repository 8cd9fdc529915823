"""A published checkpoint folder as a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from perilune.config.train import TrainConfig
from perilune.errors import CheckpointError, RequestError
from perilune.loading.loaded import LoadedRun
from perilune.model.hf import PublishedSource, fill
from perilune.model.transformer import Transformer
from perilune.tokenizer import load_tokenizer


def load_published(folder: str | Path, device: torch.device | str = "cpu") -> LoadedRun:
    """Load a published checkpoint; the model is in evaluation mode, in fp32, packed experts decoded.

    Args:
        folder: with config.json, safetensors files, and a tokenizer.
        device: where the model goes.

    Raises:
        ConfigError: config.json is not understood.
        CheckpointError: the weights are damaged or of another model, or there is no usable tokenizer.
    """
    folder = Path(folder)
    source = PublishedSource(folder)
    try:
        tokenizer = load_tokenizer(folder)
    except RequestError as error:
        raise CheckpointError(f"{folder} has no tokenizer that can be read: {error}") from None
    cfg = source.published.model
    if tokenizer.vocab_size > cfg.vocab_size:
        raise CheckpointError(
            f"vocabulary mismatch: the tokenizer in {folder} has {tokenizer.vocab_size} ids, its model only {cfg.vocab_size}"
        )
    model = fill(Transformer(cfg), source)
    return LoadedRun(model.to(device).eval(), tokenizer, TrainConfig(model=cfg))
