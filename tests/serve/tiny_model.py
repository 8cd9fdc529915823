"""A seeded tiny model in fp64 (so that ties and rounding decide nothing) and the byte tokenizer."""

from __future__ import annotations

import dataclasses

import torch

from perilune.config.presets import preset
from perilune.model import Transformer, init_weights
from perilune.serve.generator import Generator
from perilune.tokenizer import ByteTokenizer


def tiny_generator(seed: int = 0, *, sharpness: float = 8.0, vocab_size: int | None = None, **changes) -> Generator:
    """A generator over random weights; `sharpness` scales the head, so that logits are far apart."""
    tokenizer = ByteTokenizer()
    config = dataclasses.replace(preset("tiny"), vocab_size=vocab_size or tokenizer.vocab_size)
    model = Transformer(config)
    init_weights(model, seed)
    model.double()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / model.lm_head.weight.std() / config.hidden_size**0.5)
        # Control tokens are drawn only where a test wants them.
        model.lm_head.weight[256:] = 0
    return Generator(model, tokenizer, **changes)
