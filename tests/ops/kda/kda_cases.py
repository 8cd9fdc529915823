"""Inputs and comparisons shared by the KDA tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perilune.ops.kda import recurrent_kda_reference

IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def raw_inputs(
    batch: int,
    length: int,
    qk_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    sequences: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Raw logits as the model passes them, float32 numbers held in float64, with an entry state `[N, HV, K, V]`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    return {
        "q": normal(batch, length, qk_heads, key_dim),
        "k": normal(batch, length, qk_heads, key_dim),
        "v": normal(batch, length, heads, value_dim),
        "g": normal(batch, length, heads, key_dim),
        "beta": normal(batch, length, heads),
        "A_log": 0.3 * normal(heads),
        "dt_bias": normal(heads * key_dim),
        "initial_state": normal(sequences or batch, heads, key_dim, value_dim),
    }


def outputs_and_gradients(
    op: Callable[..., tuple[Tensor, Tensor | None]], inputs: dict[str, Tensor], dtype: torch.dtype, **options: object
) -> dict[str, Tensor]:
    """o, the final state, and the gradient of every input under fixed random cotangents of both."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    o, state = op(**leaves, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, state)]
    gradients = torch.autograd.grad([o, state], list(leaves.values()), cotangents)
    return {"o": o.detach(), "state": state.detach()} | {f"d_{n}": x for n, x in zip(leaves, gradients, strict=True)}


def reference(inputs: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """The float64 truth."""
    return outputs_and_gradients(recurrent_kda_reference, inputs, torch.float64, **options)


def relative_error(got: Tensor, truth: Tensor) -> float:
    """|got - truth| / |truth| in the Frobenius norm; absolute where the truth vanishes."""
    scale = truth.norm().item()
    return ((got.double() - truth).norm() / (scale if scale > 1e-30 else 1.0)).item()


def assert_close(got: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance` of the truth; NaN fails."""
    errors = {name: relative_error(got[name], truth[name]) for name in truth}
    assert all(error <= tolerance for error in errors.values()), errors
