"""A seeded tiny model in fp64 (so that ties and rounding decide nothing), the byte tokenizer, and engines over it, by
default in fp32, in which passes are recorded and cost a tenth."""

from __future__ import annotations

import dataclasses

import torch

from perilune.config.presets import preset
from perilune.model import Transformer, init_weights
from perilune.serve.local_engine import LocalEngine
from perilune.serve.runner.runner import Scores
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def tiny_model(
    seed: int = 0, *, sharpness: float = 8.0, vocab_size: int | None = None, dtype=torch.float64, **parts
) -> Transformer:
    """Random weights; `sharpness` scales the head, so that logits are far apart; `parts` replace those of the config."""
    config = dataclasses.replace(preset("tiny"), vocab_size=vocab_size or TOKENIZER.vocab_size, **parts)
    model = init_weights(Transformer(config), seed).to(dtype).eval()
    model.compute_dtype = dtype
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / model.lm_head.weight.std() / config.hidden_size**0.5)
        # Control tokens are drawn only where a test wants them.
        model.lm_head.weight[256:] = 0
    return model


def tiny_engine(
    seed: int = 0,
    *,
    name: str = "tiny",
    thinking: bool = False,
    context_length: int = 8192,
    settings=None,
    dtype=torch.float32,
    **model,
) -> LocalEngine:
    """An engine over `tiny_model` whose cache works in units of 4 tokens; with `settings` as they are."""
    settings = settings or EngineSettings(unit=4, cache_bytes=2**23)
    return LocalEngine(
        tiny_model(seed, dtype=dtype, **model), TOKENIZER, name=name, thinking=thinking, context_length=context_length, settings=settings
    )  # fmt: skip


def uncached(**settings) -> EngineSettings:
    """Settings without a prefix cache."""
    return EngineSettings(unit=4, cache_bytes=2**23, prefix_cache=False, **settings)


def talkative_engine(seed: int = 0, *, eagerness: float = 4.0, **options) -> LocalEngine:
    """An engine that likes control tokens, so that what a grammar leaves open comes to an end."""
    engine = tiny_engine(seed, sharpness=1.0, **options)

    def eager(_module, _inputs, logits):
        logits = logits.clone()
        logits[..., 256:] += eagerness
        return logits

    engine.core.runner.model.lm_head.register_forward_hook(eager)
    return engine


def scripted_engine(script: list[int], **options) -> LocalEngine:
    """An engine whose every answer is `script`, if the most likely token is drawn; its model does not run at all."""
    engine = tiny_engine(**options)

    def follow(plan, stage):
        rows = [row for row in [*(() if stage else plan.decode), *plan.stages[stage]] if row.draws]
        logits_NZ = torch.zeros(len(rows), TOKENIZER.vocab_size, dtype=torch.float64)
        for row, logits_Z in zip(rows, logits_NZ):
            at = row.chunk.end - row.sequence.prompt  # tokens of the answer so far, known or not
            logits_Z[script[min(at, len(script) - 1)]] = 1.0
        return Scores([(rows, logits_NZ)] if rows else [])

    engine.core.runner.run = follow
    return engine
