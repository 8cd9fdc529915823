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


def talkative_generator(seed: int = 0, *, eagerness: float = 4.0, **changes) -> Generator:
    """A generator that likes control tokens, so that what a grammar leaves open comes to an end."""
    generator = tiny_generator(seed, sharpness=1.0, **changes)
    forward = generator.forward

    def eager(ids_BT, state):
        logits_BZ = forward(ids_BT, state).clone()
        logits_BZ[:, 256:] += eagerness
        return logits_BZ

    generator.forward = torch.inference_mode()(eager)
    return generator


def scripted_generator(script: list[int]) -> Generator:
    """A generator whose every answer is `script`, if the most likely token is drawn."""
    generator = tiny_generator()
    forward, start, step = generator.forward, generator.start, [0]

    def restart(*arguments, **options):
        step[0] = 0
        return start(*arguments, **options)

    def follow(ids_BT, state):
        logits_BZ = torch.zeros_like(forward(ids_BT, state))
        step[0] = 0 if len(ids_BT[0]) > 1 else step[0] + 1
        logits_BZ[:, script[min(step[0], len(script) - 1)]] = 1.0
        return logits_BZ

    generator.forward, generator.start = torch.inference_mode()(follow), restart
    return generator
