"""Both sides of each elementwise bench case compute the same thing; otherwise their times say nothing."""

from __future__ import annotations

import pytest
import torch

from perilune.bench.elementwise import ElementwiseCase, cases


@pytest.mark.parametrize("case", cases(tokens=16, width=64, vocabulary=10), ids=lambda case: case.name)
def test_ours_equals_the_peer(case: ElementwiseCase) -> None:
    inputs = case.inputs()
    torch.testing.assert_close(
        case.forward(case.ours, inputs)(), case.forward(case.peer, inputs)(), rtol=1e-4, atol=1e-4
    )
    cotangents = []
    for function in (case.ours, case.peer):
        torch.manual_seed(5)  # the same cotangent on both sides
        cotangents.append(case.forward_backward(function, inputs)())
    for got, want in zip(*cotangents, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_case_names_its_traffic() -> None:
    """A norm reads and writes its activations once forward; backward reads two tensors and writes one."""
    norm = cases(tokens=16, width=64)[0]
    assert norm.name == "rms_norm" and (norm.forward_bytes, norm.backward_bytes) == (2 * 4096, 3 * 4096)
