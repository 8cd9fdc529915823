"""A short continuation beside each evaluation: what the model writes by now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from perilune.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from perilune.train.trainer import Trainer

PROMPT = "def "
TOKENS = 48
TEMPERATURE = 0.8


class Sample(Callback):
    """Continues a fixed prompt at every periodic evaluation and at the end, with a generator of its own."""

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Follow an evaluation."""
        if record["kind"] == "eval":
            text = continuation(trainer, PROMPT, TOKENS)
            trainer.record({"kind": "sample", "step": trainer.step, "prompt": PROMPT, "text": text})


@torch.no_grad()
def continuation(trainer: Trainer, prompt: str, tokens: int) -> str:
    """Text of `tokens` tokens drawn after `prompt`; depends on the weights, the run's seed and the step only."""
    model, tokenizer = trainer.model, trainer.data.tokenizer
    generator = torch.Generator().manual_seed(trainer.config.seed * 1_000_003 + trainer.step)
    was_training = model.training
    model.eval()
    try:
        state = model.new_state(1, capacity=tokens + 16)
        ids, drawn = tokenizer.encode(prompt), []
        while len(drawn) < tokens:
            logits = model(torch.tensor([ids], device=model.device), state, logits="last").logits_BTZ[0, -1]
            odds = torch.softmax(logits.float().cpu()[: tokenizer.vocab_size] / TEMPERATURE, dim=-1)
            token = int(torch.multinomial(odds, 1, generator=generator))
            if token in tokenizer.special:
                break
            drawn.append(token)
            ids = [token]
    finally:
        model.train(was_training)
    return tokenizer.decode(drawn)
