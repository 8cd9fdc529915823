"""The model that an explanation is computed from: a run's, or a small one with seeded weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from perilune.config.model import ModelConfig
from perilune.config.presets import tiny
from perilune.errors import RequestError
from perilune.loading import load_run
from perilune.model import Transformer, init_weights
from perilune.tokenizer import ByteTokenizer, Tokenizer

Mixer = TypeVar("Mixer", bound=nn.Module)

SENTENCE = "def area(width, height):\n    return width * height\n"
MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and a text.

    Attributes:
        model: in evaluation mode, fp32, on the CPU.
        ids_BT: int64 `[1, T]`, the text's tokens.
        tokens: what each token reads, made visible (newline and space as marks).
        trained: False for seeded weights that have learnt nothing.
        label: how to name it in a sentence.
        seed: of the seeded weights.
    """

    model: Transformer
    tokenizer: Tokenizer
    ids_BT: Tensor
    tokens: list[str]
    trained: bool
    label: str
    seed: int = 0

    @property
    def cfg(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.cfg

    def mixers(self, kind: type[Mixer]) -> dict[int, Mixer]:
        """The model's sequence mixers of a kind, by layer.

        Raises:
            RequestError: it has none.
        """
        found: dict[int, Mixer] = {}
        for index, block in enumerate(self.model.layers):
            mixer = getattr(block, "mixer", None)
            if isinstance(mixer, kind):
                found[index] = mixer
        if not found:
            raise RequestError(
                f"{self.label} has no {kind.__name__} layer, its mixers are {', '.join(self.cfg.layer_mixers)}; name another --run, or none"
            )
        return found

    def only_if_trained(self) -> list[str]:
        """A warning that the picture shows the start of training; empty for a trained model."""
        return (
            []
            if self.trained
            else ["These weights are seeded, not trained: add --run NAME to see what a model learnt."]
        )


def subject(run: str | None = None, text: str | None = None, seed: int = 0) -> Subject:
    """Load the run `run`, or seed a tiny model that reads bytes.

    Raises:
        CheckpointError: no such run, or it has no whole checkpoint.
        RequestError: `text` is empty or too long.
    """
    if run is not None:
        model, tokenizer, _ = load_run(run)
        label, trained = f"the run {run}", True
    else:
        tokenizer = ByteTokenizer()
        config = replace(tiny(), vocab_size=tokenizer.vocab_size)
        model, label, trained = init_weights(Transformer(config), seed), f"a tiny model with seed {seed}", False
    ids = tokenizer.encode(SENTENCE if text is None else text)
    if not 2 <= len(ids) <= MAX_TOKENS:
        raise RequestError(f"the text has {len(ids)} tokens; allowed: 2 to {MAX_TOKENS}; give --text of that length")
    tokens = [visible(tokenizer.decode_bytes([token])) for token in ids]
    return Subject(
        model=model.eval(),
        tokenizer=tokenizer,
        ids_BT=torch.tensor([ids]),
        tokens=tokens,
        trained=trained,
        label=label,
        seed=seed,
    )


def visible(data: bytes) -> str:
    """A token's bytes as a short printable word."""
    text = data.decode("utf-8", errors="replace")
    for hidden, mark in ((" ", "␣"), ("\n", "↵"), ("\t", "⇥"), ("\r", "␍")):
        text = text.replace(hidden, mark)
    return "".join(character if character.isprintable() else "·" for character in text) or "·"


def numbered(tokens: list[str]) -> list[str]:
    """Token labels that differ from each other, for an axis."""
    return [f"{position} {token}" for position, token in enumerate(tokens)]
