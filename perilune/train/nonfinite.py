"""Finding where a NaN or infinity came from, so that a stopped run says more than "loss is nan"."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from perilune.errors import RequestError


class DivergedError(RequestError):
    """Training met a NaN or an infinity and stopped before it reached the weights."""


def first_bad(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Describe the first tensor that has a NaN or infinity, with how many; None if all are finite."""
    for name, tensor in named:
        if tensor is not None and tensor.is_floating_point():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                return f"{name} ({bad} of {tensor.numel()} values are not finite)"
    return None


@torch.no_grad()
def first_bad_activation(model: nn.Module, forward) -> str | None:
    """Run `forward()` once more and name the first module whose output is not finite; None if all are.

    The model is put into evaluation mode for this, so that nothing is counted or observed.
    """
    found: list[str] = []
    handles = []

    def watch(name: str):
        def hook(_module: nn.Module, _inputs, output) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(value, Tensor):
                bad = first_bad([(f"output of {name}", value)])
                if bad:
                    found.append(bad)

        return hook

    was_training = model.training
    model.eval()
    try:
        handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
        forward()
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return found[0] if found else None
