"""An independent library agrees: outputs and gradients of flash-linear-attention's naive KDA, recorded once.

`tests/golden/kda_fla_core.npz` holds, for the bounded and the softplus gate, float32 inputs drawn by
`numpy.random.default_rng(11)`, cotangents, and what fla-core 0.6.0 computed from them on a CPU: `naive_kda_gate` or
`naive_kda_lowerbound_gate`, `naive_recurrent_kda`, and autograd through both (q and k divided by sqrt(sum x^2 + 1e-6),
beta through a sigmoid first). It was made in an environment of its own with fla-core, einops and triton 3.6.0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kda_cases import IN_KERNEL, relative_error

from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda

GOLDEN = Path(__file__).parents[2] / "golden" / "kda_fla_core.npz"
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.mark.parametrize("implementation", ["reference", "torch", "native"])
@pytest.mark.parametrize(("case", "lower_bound"), [("bounded", -5.0), ("softplus", None)])
def test_agrees_with_flash_linear_attention(case: str, lower_bound: float | None, implementation: str) -> None:
    with np.load(GOLDEN) as file:
        golden = {n.removeprefix(f"{case}."): torch.from_numpy(file[n]) for n in file.files if n.startswith(f"{case}.")}
    leaves = {name: golden[name].clone().requires_grad_() for name in INPUTS}
    with force(implementation):
        o, state = chunk_kda(**leaves, output_final_state=True, lower_bound=lower_bound, **IN_KERNEL)
    cotangents = [golden["cotangent_o"], golden["cotangent_state"]]
    gradients = torch.autograd.grad([o, state], list(leaves.values()), cotangents)
    results = {"o": o.detach(), "state": state.detach()} | {f"d_{n}": g for n, g in zip(INPUTS, gradients, strict=True)}
    for name, got in results.items():
        assert relative_error(got, golden[name].double()) < 3e-6, name
