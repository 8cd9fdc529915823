"""The product of the projections, in all three ways, against fp64."""

import pytest
import torch

from perilune.ops.choice import force
from perilune.ops.linear import FEW_ROWS, MAX_WEIGHTS, linear, linears, select


def operands(tokens, out, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(out + width)
    return torch.randn(tokens, width, generator=generator).to(dtype), torch.randn(out, width, generator=generator)


@pytest.mark.parametrize("tokens", [1, 3, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (4, 7), (5, 64), (768, 256), (4096, 128)])
def test_equals_fp64(tokens, out, width):
    x, w = operands(tokens, out, width)
    with torch.no_grad():
        y = linear(x, w)
    truth = x.double() @ w.double().T
    assert y.dtype == torch.float32
    assert (y - truth).norm() <= 3e-7 * max(1, width) ** 0.5 * truth.norm()


def test_a_row_does_not_depend_on_its_batch_or_on_threads():
    x, w = operands(FEW_ROWS, 1024, 96)
    with torch.no_grad():
        if select(x, w).implementation != "native":
            pytest.skip("no native kernel here")
        together = linear(x, w)
        alone = torch.cat([linear(x[i : i + 1], w) for i in range(FEW_ROWS)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("tokens", [1, 5, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("sizes", [(7,), (64, 4, 1, 33), tuple(range(1, MAX_WEIGHTS + 3))])
def test_several_weights_of_one_x_give_what_each_gives(tokens, sizes):
    x = operands(tokens, 1, 50)[0]
    weights = [operands(1, out, 50)[1] for out in sizes]
    with torch.no_grad():
        together = linears(x, *weights)
        for y, w in zip(together, weights, strict=True):
            assert torch.equal(y, linear(x, w))
        half = linears(x, weights[0], weights[0].double())  # a weight that the kernel cannot read
        torch.testing.assert_close(half[0], half[1])


def test_gradients_take_torch_and_agree():
    x, w = operands(2, 5, 6)
    x.requires_grad_(), w.requires_grad_()
    assert select(x, w).implementation == "torch"
    linear(x, w).square().sum().backward()
    a, b = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    (x @ w.T).square().sum().backward()
    torch.testing.assert_close(a, x.grad)
    torch.testing.assert_close(b, w.grad)


def test_bf16_rows_keep_their_dtype_and_lose_no_more_than_the_rounding():
    x, w = operands(20, 33, 64, torch.bfloat16)
    w = w.bfloat16().float()
    y = linear(x, w)
    truth = x.double() @ w.double().T
    assert y.dtype == torch.bfloat16
    assert (y.double() - truth).norm() / truth.norm() < 4e-3


def test_strided_and_forced():
    x, w = operands(4, 12, 16)
    with torch.no_grad(), force("torch"):
        assert select(x, w).implementation == "torch"
        plain = linear(x.T.contiguous().T, w)
    with torch.no_grad():
        torch.testing.assert_close(linear(x.T.contiguous().T, w), plain, rtol=1e-5, atol=1e-5)


def test_nan_propagates():
    x, w = operands(2, 8, 9)
    x[1, 3] = torch.nan
    with torch.no_grad():
        y = linear(x, w)
    assert torch.isfinite(y[0]).all() and torch.isnan(y[1]).all()
