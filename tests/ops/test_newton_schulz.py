"""Newton-Schulz: singular values, an independent implementation, and degenerate matrices."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from perilune.ops.choice import force
from perilune.ops.newton_schulz import COEFFICIENTS, gram_form, newton_schulz, select


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12), (3, 2, 24, 32), (5, 64, 8)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_singular_values_end_near_one_and_vectors_stay(shape, scale):
    x = random(*shape, dtype=torch.float64)
    out = newton_schulz(x * scale)
    assert out.shape == x.shape and out.dtype == x.dtype
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    # In the basis of the input's own singular vectors the output is diagonal.
    core = u.mT @ out @ vh.mT
    values = core.diagonal(dim1=-2, dim2=-1)
    assert (core - torch.diag_embed(values)).abs().max() < 1e-6
    large = s > 0.05 * s.amax(-1, keepdim=True)  # tiny ones need more than five steps
    assert values[large].min() > 0.65 and values.max() < 1.25


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24)])
def test_bfloat16_products_equal_torchs_muon(shape):
    x = random(*shape)
    ours = newton_schulz(x, dtype=torch.bfloat16)
    theirs = _zeropower_via_newtonschulz(x, COEFFICIENTS, 5, 1e-7).float()
    exact = newton_schulz(x.double())
    assert (ours - theirs).abs().max() < 0.03
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert (newton_schulz(x) - exact).abs().max() < 2e-5


def test_a_batch_equals_its_matrices():
    x = random(2, 3, 20, 9)
    out = newton_schulz(x)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(out[i, j], newton_schulz(x[i, j]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t44_zero_and_one_row_matrices_stay_finite(dtype):
    x = random(4, 16, 24)
    x[1] = 0
    x[2, 1:] = 0
    out = newton_schulz(x, dtype=dtype)
    assert out.isfinite().all() and (out[1] == 0).all()
    for row in (random(1, 50), random(50, 1), random(1, 1), torch.zeros(1, 7)):
        assert newton_schulz(row, dtype=dtype).isfinite().all()
    torch.testing.assert_close(newton_schulz(random(1, 50)).norm(), torch.tensor(1.0), rtol=0, atol=0.35)
    assert newton_schulz(torch.zeros(0, 4, 6)).shape == (0, 4, 6)


def test_a_direction_scaled_50_fold_does_not_dominate_other_heads():
    """Per-head update RMS stays equal although one head's gradient is 50 times larger (training §2.3)."""
    x = random(4, 16, 64)
    x[2] *= 50
    rms = newton_schulz(x).square().mean((-2, -1)).sqrt()
    assert rms.max() / rms.min() < 1.1


@pytest.mark.parametrize("shape", [(5, 8, 8), (3, 7, 30), (2, 2, 33, 5), (1, 1, 9)])
@pytest.mark.parametrize("steps", [0, 4, 5])
def test_native_equals_torch_and_leaves_the_input_alone(shape, steps):
    x = random(*shape)
    kept = x.clone()
    found = newton_schulz(x, steps)
    with force("torch"):
        expected = newton_schulz(x, steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    assert torch.equal(x, kept)
    assert select(x, torch.bfloat16).implementation == "torch"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("least", [0.3, 1e-2, 1e-4])
def test_the_form_on_gram_matrices_equals_the_iteration(dtype, least):
    """Singular values over several orders of magnitude; bfloat16 may cost as much as in the plain iteration, not more than twice."""
    u = torch.linalg.qr(random(3, 12, 12, dtype=torch.float64))[0]
    v = torch.linalg.qr(random(3, 80, 12, dtype=torch.float64))[0]
    x = u * torch.logspace(0, float(torch.tensor(least).log10()), 12, dtype=torch.float64) @ v.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    x[2] = 0
    exact = newton_schulz(x)
    found = (gram_form(x.to(dtype), 5, COEFFICIENTS).double() - exact).norm() / exact.norm()
    limit = {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype)
    if limit is None:
        limit = 2 * (newton_schulz(x.float(), dtype=dtype).double() - exact).norm() / exact.norm()
    assert found < limit
