"""The mechanisms that can be explained."""

from __future__ import annotations

import difflib
import importlib

from perilune.errors import RequestError
from perilune.explain.explanation import Explanation
from perilune.explain.subject import subject

MECHANISMS: dict[str, str] = {
    "kda": "Kimi Delta Attention: a fixed-size memory that corrects itself",
    "mla": "gated latent attention without positions: a small cache",
    "attnres": "attention over depth instead of a residual stream",
    "latent_moe": "many experts in a narrower space",
    "situ": "the bounded gated unit",
    "quantile_balancing": "even expert load in one update",
    "muon": "orthogonal updates, head by head",
    "qk_clip": "bounded attention logits",
    "vision": "a picture as rows of the text model",
    "curriculum": "longer windows in stages, packed documents",
}
ALIASES = {
    "moe": "latent_moe",
    "qb": "quantile_balancing",
    "situ_glu": "situ",
    "attention_residuals": "attnres",
    "packing": "curriculum",
    "moonvit": "vision",
}


def explain(mechanism: str, *, run: str | None = None, text: str | None = None, seed: int = 0) -> Explanation:
    """Explain a mechanism on the model of a run, or on a seeded tiny one.

    Raises:
        RequestError: an unknown mechanism, or the model does not have it, or `text` cannot be used.
        CheckpointError: no such run, or it has no whole checkpoint.
    """
    name = mechanism.lower().replace("-", "_")
    name = ALIASES.get(name, name)
    if name not in MECHANISMS:
        near = difflib.get_close_matches(name, [*MECHANISMS, *ALIASES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RequestError(f"unknown mechanism {mechanism!r}{hint}; known: {', '.join(MECHANISMS)}")
    return importlib.import_module(f"perilune.explain.{name}").explain(subject(run, text, seed))
