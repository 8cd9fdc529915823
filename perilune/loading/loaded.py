"""What loading gives."""

from __future__ import annotations

from typing import NamedTuple

from perilune.config.train import TrainConfig
from perilune.model.transformer import Transformer
from perilune.tokenizer import Tokenizer


class LoadedRun(NamedTuple):
    """A model with its tokenizer and configuration; of a published checkpoint the training settings are the defaults."""

    model: Transformer
    tokenizer: Tokenizer
    config: TrainConfig
