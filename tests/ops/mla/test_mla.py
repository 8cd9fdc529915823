"""Attention against an unblocked softmax in float64; the absorbed form against the expanded one."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.choice import force
from perilune.ops.mla import attend, attend_latent, max_logit, native
from perilune.ops.segments import Segments

ATTEND = ["torch"] if native.why_no_attention(torch.zeros(1, 1, 1, 4)) else ["torch", "native"]
DECODE = ["torch"] if native.why_no_decode(*[torch.zeros(1, 1, 1, 4)] * 3) else ["torch", "native"]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def visible(tokens, past, segments=None):
    """Bool [B or 1, T, S]: which keys each query may see."""
    seen_TS = torch.arange(past + tokens) <= past + torch.arange(tokens)[:, None]
    if segments is None:
        return seen_TS[None]
    ids = segments.segment_id_BT
    return seen_TS & (ids[:, :, None] == ids[:, None, :])


def unblocked(q, k, v, scale, segments=None, past=0):
    """Softmax over explicit scores."""
    score = torch.einsum("bthk,bshk->bhts", q, k) * scale
    score = score.masked_fill(~visible(q.shape[1], past, segments)[:, None], -torch.inf)
    return torch.einsum("bhts,bshv->bthv", score.softmax(-1), v)


def packed(batch, tokens, documents, seed=0):
    starts = torch.zeros(batch * tokens, dtype=torch.bool)
    starts[torch.randperm(batch * tokens, generator=torch.Generator().manual_seed(seed))[:documents]] = True
    return Segments.from_starts(starts.view(batch, tokens))


CASES = [  # batch, tokens, past, heads, K, V, documents
    (2, 50, 0, 3, 12, 8, None),
    (1, 1, 0, 1, 4, 4, None),
    (2, 1, 37, 2, 24, 16, None),
    (1, 9, 20, 2, 8, 12, None),
    (2, 130, 0, 2, 16, 8, 3),
    (1, 70, 0, 2, 16, 8, 40),
    (1, 300, 0, 2, 48, 32, None),
]


def gradients(function, q, k, v, *rest, **options):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = function(q, k, v, *rest, **options)
    dout = randn(*out.shape, seed=9, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation,dtype", [("torch", torch.float64), *((i, torch.float32) for i in ATTEND)])
def test_attend_equals_explicit_softmax(case, implementation, dtype):
    batch, tokens, past, heads, key, value, documents = case
    q, k, v = randn(batch, tokens, heads, key), randn(batch, past + tokens, heads, key, seed=1), None
    v = randn(batch, past + tokens, heads, value, seed=2)
    segments = None if documents is None else packed(batch, tokens, documents)
    expected = gradients(unblocked, q, k, v, 0.3, segments, past)
    with force(implementation):
        found = gradients(attend, q.to(dtype), k.to(dtype), v.to(dtype), 0.3, segments, past)
    for ours, exact in zip(found, expected):
        assert ours.dtype == dtype
        tolerance = 1e-12 if dtype == torch.float64 else 3e-6
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("implementation", ATTEND)
def test_strided_operands_and_a_frozen_query(implementation):
    fused = randn(2, 20, 3, 12 + 12 + 8, dtype=torch.float32)
    q, k, v = fused.split((12, 12, 8), dim=-1)
    wanted = unblocked(q.double(), k.double(), v.double(), 0.4)
    v = v.detach().requires_grad_()
    with force(implementation):
        out = attend(q, k, v, 0.4)
        out.sum().backward()
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=3e-6)
    assert v.grad.isfinite().all()


@pytest.mark.parametrize("implementation", ATTEND)
def test_half_precision_inputs(implementation):
    q, k, v = (randn(2, 40, 2, width, seed=i, dtype=torch.bfloat16) for i, width in enumerate((16, 16, 8)))
    exact = unblocked(q.double(), k.double(), v.double(), 0.25)
    with force(implementation):
        wide, narrow = attend(q, k, v, 0.25), attend(q, k, v, 0.25, fp32_output=False)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=1e-5)  # no rounding to bf16 on the way
    torch.testing.assert_close(narrow.double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("implementation", ATTEND)
@pytest.mark.parametrize("documents", [None, 4])
def test_the_future_never_reaches_the_past_bitwise(implementation, documents):
    q, k, v = (randn(1, 200, 2, width, seed=i, dtype=torch.float32) for i, width in enumerate((16, 16, 8)))
    segments = None if documents is None else packed(1, 200, documents, seed=5)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, 77:] = 5 * randn(*x[:, 77:].shape, seed=8, dtype=torch.float32)
    with force(implementation):
        before, after = attend(q, k, v, 0.3, segments), attend(*changed, 0.3, segments)
    assert torch.equal(before[:, :77], after[:, :77])
    assert not torch.equal(before[:, 77:], after[:, 77:])


@pytest.mark.parametrize("implementation", ATTEND)
def test_without_positions_the_order_of_the_history_does_not_matter(implementation):
    q, k, v = (randn(1, 90, 2, width, seed=i, dtype=torch.float32) for i, width in enumerate((16, 16, 8)))
    order = torch.cat((torch.randperm(89), torch.tensor([89])))
    with force(implementation):
        last, permuted = attend(q, k, v, 0.3)[:, -1], attend(q, k[:, order], v[:, order], 0.3)[:, -1]
    torch.testing.assert_close(last, permuted, rtol=0, atol=2e-6)


def latent_operands(batch, tokens, past, heads, nope, shared, value, latent, dtype):
    sizes = [(batch, tokens, heads, nope), (batch, tokens, heads, shared), (batch, past + tokens, latent + shared)]
    q_nope, q_shared, entries = (randn(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes))
    weight = randn(heads, nope + value, latent, seed=7, dtype=dtype) / latent**0.5
    return q_nope, q_shared, *entries.split((latent, shared), -1), *weight.split((nope, value), 1)


def expanded(q_nope, q_shared, latent, shared, w_uk, w_uv, scale, past):
    """Rebuild keys and values from the latents, then ordinary attention."""
    k_nope = torch.einsum("bsl,hnl->bshn", latent, w_uk)
    v = torch.einsum("bsl,hvl->bshv", latent, w_uv)
    k = torch.cat((k_nope, shared[:, :, None].expand(*k_nope.shape[:3], -1)), -1)
    return unblocked(torch.cat((q_nope, q_shared), -1), k, v, scale, past=past)


LATENT_CASES = [
    (1, 1, 0, 1, 4, 2, 4, 8),
    (2, 1, 40, 4, 32, 16, 32, 64),
    (2, 3, 10, 3, 5, 3, 7, 9),
    (1, 8, 250, 2, 16, 8, 12, 33),
]


@pytest.mark.parametrize("case", LATENT_CASES)
@pytest.mark.parametrize("implementation,dtype", [("torch", torch.float64), *((i, torch.float32) for i in DECODE)])
def test_absorbed_form_equals_the_expanded_form(case, implementation, dtype):
    exact = latent_operands(*case, torch.float64)
    expected = expanded(*exact, 0.2, case[2])
    with force(implementation), torch.no_grad():
        found = attend_latent(*(x.to(dtype) for x in exact), 0.2, case[2])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("implementation", DECODE)
def test_absorbed_form_in_bfloat16_with_any_weight_and_cache_dtype(implementation):
    operands = latent_operands(2, 1, 30, 4, 32, 16, 32, 64, torch.bfloat16)
    expected = expanded(*(x.double() for x in operands), 0.2, 30)
    for weights in (torch.bfloat16, torch.float32):
        args = [x.to(weights) if i >= 4 else x for i, x in enumerate(operands)]
        with force(implementation), torch.no_grad():
            found = attend_latent(*args, 0.2, 30)
        assert found.dtype == torch.bfloat16
        assert float((found.double() - expected).abs().max()) < 0.03 * float(expected.abs().max())


@pytest.mark.parametrize("implementation", DECODE)
def test_absorbed_form_reads_a_slice_of_a_larger_cache(implementation):
    """Decode passes views of a cache with spare capacity, which may hold anything."""
    args = latent_operands(2, 1, 20, 2, 8, 4, 8, 16, torch.float32)
    cache = torch.full((2, 64, 20), float("nan"))
    cache[:, :21] = torch.cat(args[2:4], -1)
    views = cache[:, :21].split((16, 4), -1)
    with force(implementation), torch.no_grad():
        plain = attend_latent(*args, 0.3, 20)
        sliced = attend_latent(*args[:2], *views, *args[4:], 0.3, 20)
    torch.testing.assert_close(sliced, plain, rtol=0, atol=1e-6)


def test_absorbed_form_is_differentiable():
    args = [
        x.requires_grad_() for x in (y.detach().clone() for y in latent_operands(1, 2, 3, 2, 3, 2, 3, 4, torch.float64))
    ]
    assert torch.autograd.gradcheck(lambda *a: attend_latent(*a, 0.3, 3), args)
    single = [x.detach().float().requires_grad_() for x in args]
    attend_latent(*single, 0.3, 3).sum().backward()
    assert all(x.grad is not None for x in single)


@pytest.mark.parametrize("documents", [None, 5])
def test_max_logit_is_exact(documents):
    q, k = randn(2, 600, 3, 8), randn(2, 600, 3, 8, seed=1)
    segments = None if documents is None else packed(2, 600, documents)
    score = torch.einsum("bthk,bshk->bhts", q, k) * 0.7
    score = score.masked_fill(~visible(600, 0, segments)[:, None], -torch.inf)
    found = max_logit(q.requires_grad_(), k, 0.7, segments)
    torch.testing.assert_close(found, score.amax((0, 2, 3)), rtol=1e-13, atol=0)
    assert not found.requires_grad
    past = randn(1, 3, 2, 4), randn(1, 8, 2, 4, seed=3)
    score = (torch.einsum("bthk,bshk->bhts", *past)).masked_fill(~visible(3, 5)[:, None], -torch.inf)
    torch.testing.assert_close(max_logit(*past, 1.0, past=5), score.amax((0, 2, 3)))
