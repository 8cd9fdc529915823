"""States between segments by the CUDA kernel, in the emulator, against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.cuda import emulated
from perilune.ops.cuda.emulator import missing
from perilune.ops.kda.cuda import fold as stage
from perilune.ops.kda.gpu.plan import Plan

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
UNITS = (3, 1, 5, 2)  # of four sequences
HEADS = 2


def make(key_dim: int, value_dim: int, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Plan]:
    """M and N with NaN where no kernel wrote, states `[sequences, heads, K, V]`, and the units."""
    generator = torch.Generator().manual_seed(0)
    total = sum(UNITS)
    M = torch.randn(total, HEADS, key_dim, key_dim, generator=generator) / key_dim**0.5
    N = torch.randn(total, HEADS, value_dim, key_dim, generator=generator)
    sequences, first = [], 0
    for count in UNITS:
        begin, end = first, first + count - 1
        unknown = (end, begin) if reverse else (begin, end)  # of the unit that is walked first M, of the last one both
        M[list(unknown)], N[unknown[1]] = float("nan"), float("nan")
        sequences.append((first, count))
        first += count
    state = torch.randn(len(UNITS), HEADS, key_dim, value_dim, generator=generator)
    table = torch.tensor(sequences, dtype=torch.int32)
    return M, N, state, Plan(table, table, table, True, 64)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 128), (128, 64)])
@pytest.mark.parametrize("given", [False, True])
def test_states_that_enter_and_leave(given: bool, key_dim: int, value_dim: int, reverse: bool, backwards: bool) -> None:
    M, N, state, p = make(key_dim, value_dim, reverse)
    out = torch.full_like(N, float("nan"))
    strides = (state.stride(0), state.stride(1), state.stride(3), state.stride(2)) if given else (0, 0, 0, 0)
    with emulated(backwards):
        assert stage.unsuitable(key_dim, value_dim, N.device, reverse) is None
        launch = stage.laid_out(N.device, HEADS, value_dim, key_dim, p, strides, reverse)
        launch(M, N, state if given else None, p.sequences, out)
    for n, (first, count) in enumerate(p.sequences.tolist()):
        truth = state[n].double().transpose(-1, -2) if given else torch.zeros(HEADS, value_dim, key_dim).double()
        order = range(first + count - 1, first - 1, -1) if reverse else range(first, first + count)
        for step, unit in enumerate(order):
            assert torch.allclose(out[unit].double(), truth, rtol=1e-5, atol=1e-5), (n, unit)
            if step == 0:
                truth = N[unit].double()
            else:
                m = M[unit].double()
                truth = truth @ (m.transpose(-1, -2) if reverse else m) + N[unit].double()


def test_calls_that_it_does_not_take_say_why() -> None:
    assert "64 or 128, not 32 and 64" in str(stage.unsuitable(32, 64, torch.device("cpu"), False))
    assert "cpu" in str(stage.unsuitable(64, 64, torch.device("cpu"), False))
