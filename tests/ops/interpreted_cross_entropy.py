"""Losses and gradients of rows of logits: the Triton kernel against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from perilune.ops.choice import force
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.triton.cross_entropy import rows


@pytest.mark.parametrize("vocabulary", [37, 4096, 5000])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_losses_and_gradients(reduction: str, vocabulary: int) -> None:
    torch.manual_seed(0)
    x, weight, target = torch.randn(9, 6), torch.randn(vocabulary, 6), torch.randint(0, vocabulary, (9,))
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        if dtype == torch.float32:
            with force("triton"):
                loss = linear_cross_entropy(*inputs, target, reduction=reduction, chunk=4)
        else:
            loss = functional.cross_entropy(inputs[0] @ inputs[1].t(), target, reduction=reduction)
        cotangent = torch.linspace(0.5, 1.5, loss.numel(), dtype=dtype).view(loss.shape)
        found.append([loss.detach(), *torch.autograd.grad(loss, inputs, cotangent)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_count() -> None:
    torch.manual_seed(0)
    logits, target = 9 * torch.randn(6, 300), torch.tensor([5, -100, 299, 300, -100, 0])
    logits[1, 7], logits[4] = float("inf"), float("-inf")
    exact, factor = logits.double(), torch.rand(6)
    loss = rows(logits, target, -100, True, factor)
    assert loss[1] == loss[4] == 0 and loss[3].isnan(), "ignored, ignored, outside the vocabulary"
    assert not logits[1].any() and not logits[4].any()
    for row in (0, 2, 5):
        own = exact[row].clone().requires_grad_()
        value = functional.cross_entropy(own, target[row])
        (factor[row].double() * value).backward()
        torch.testing.assert_close(loss[row].double(), value.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits[row].double(), own.grad, rtol=1e-5, atol=1e-7)
