"""Cut-offs of nuclei: short lists equal a sort; the kernel compiles for sm_90. Its numbers: `interpreted_top_p`, `tests/gpu`."""

from __future__ import annotations

import os

import pytest
import torch

from perilune.ops.top_p import SHORTLISTS, by_lists, select
from perilune.ops.triton.available import missing


def test_short_lists_give_what_a_sort_gives():
    logits_NZ = torch.randn(4, 3000)
    logits_NZ[1] *= 9
    scale_N1 = torch.tensor([[1.0], [0.5], [2.0], [0.1]])
    weights_NZ = torch.exp((logits_NZ - logits_NZ.amax(-1, keepdim=True)) * scale_N1)
    for share in (0.05, 0.7, 0.999):
        goal_N1 = share * weights_NZ.sum(-1, True, dtype=torch.float64)
        ours = by_lists(logits_NZ, weights_NZ, goal_N1, ())
        assert torch.equal(ours, by_lists(logits_NZ, weights_NZ, goal_N1, SHORTLISTS))
        enough, less = (weights_NZ.double() * reached for reached in (logits_NZ >= ours, logits_NZ > ours))
        assert (enough.sum(-1, True) >= goal_N1 * (1 - 1e-12)).all()
        assert (less.sum(-1, True) < goal_N1).all()


def test_on_a_cpu_it_is_torch():
    assert select(torch.zeros(2, 9)).implementation == "torch"


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("vocab", [288, 163_840])
def test_it_compiles_without_spills(vocab):
    from compiled_for_hopper import compiled

    from perilune.ops.triton.top_p import cutoff

    (kernel,) = compiled(
        lambda: cutoff(torch.empty(3, vocab), torch.empty(3, vocab), torch.empty(3, 1, dtype=torch.float64))
    )
    assert kernel.spilled == 0 and kernel.registers * 32 * kernel.warps <= 65536
