"""The routed experts against a dense computation of every expert in float64, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.moe import decode, dispatch_plan, experts, mlp_decode, moe_decode, native, route, routed_experts
from perilune.ops.native.blas import why_no_blas

HAVE_NATIVE = not (native.why_not(torch.zeros(1), dtypes=(torch.float32,)) or why_no_blas())
IMPLEMENTATIONS = ["torch", "native"] if HAVE_NATIVE else ["torch"]
ACTIVATIONS = [("situ", 4.0, 25.0), ("situ", 1.5, None), ("swiglu", 4.0, 25.0)]


def dense_oracle(z_NL, index_NA, weight_NA, w1_EFL, w3_EFL, w2_ELF, activation, beta, linear_beta):
    """Compute all experts for all tokens and mix with a dense [N, E] weight matrix."""
    gate = torch.einsum("nl,efl->nef", z_NL, w1_EFL)
    up = torch.einsum("nl,efl->nef", z_NL, w3_EFL)
    if activation == "swiglu":
        hidden = F.silu(gate) * up
    else:
        left = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        hidden = left * (up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta))
    y_NEL = torch.einsum("nef,elf->nel", hidden, w2_ELF)
    mix_NE = torch.zeros(z_NL.shape[0], w1_EFL.shape[0], dtype=z_NL.dtype).scatter(1, index_NA, weight_NA)
    return torch.einsum("ne,nel->nl", mix_NE, y_NEL)


def operands(tokens, width, hidden, num_experts, active, *, dtype=torch.float64, seed=0, favourite=None):
    """Random operands in float64 precision; `favourite` sends every token to that expert first."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = torch.rand(tokens, num_experts, generator=generator)
    if favourite is not None:
        keys[:, favourite] = 2.0
    index_NA = keys.topk(active, dim=-1).indices
    weight_NA = torch.rand(tokens, active, generator=generator, dtype=torch.float64)
    w1, w3 = (2 * randn(num_experts, hidden, width) / width**0.5 for _ in range(2))
    w2 = randn(num_experts, width, hidden) / hidden**0.5
    return [randn(tokens, width).to(dtype), index_NA, weight_NA, w1.to(dtype), w3.to(dtype), w2.to(dtype)]


def with_gradients(function, args, *options):
    """Return (out, dz, dweight, dw1, dw3, dw2) for a fixed random output gradient."""
    args = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
    out = function(*args, *options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64).to(out.dtype)
    wanted = [a for a in args if a.is_floating_point()]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout, allow_unused=False)]


def call(*args):
    """`routed_experts` with the caps given by position."""
    return routed_experts(*args[:-2], beta=args[-2], linear_beta=args[-1])


@pytest.mark.parametrize("options", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(37, 12, 10, 6, 2), (5, 8, 16, 12, 3), (1, 4, 4, 3, 2), (64, 16, 8, 4, 3)])
def test_float64_equals_the_dense_oracle(shape, options):
    args = operands(*shape)
    for found, expected in zip(with_gradients(call, args, *options), with_gradients(dense_oracle, args, *options)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", ACTIVATIONS)
def test_float32_is_within_rounding_of_float64(implementation, options):
    args = operands(300, 48, 40, 9, 4)
    expected = with_gradients(dense_oracle, args, *options)
    with force(implementation):
        found = with_gradients(call, [a.float() if a.is_floating_point() else a for a in args], *options)
    for ours, exact in zip(found, expected):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=3e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wide_weights", [False, True])
def test_bfloat16_tokens(implementation, wide_weights):
    args = operands(60, 32, 24, 5, 2, dtype=torch.bfloat16)
    if wide_weights:
        args[3:] = [w.float() for w in args[3:]]
    options = ACTIVATIONS[0]
    expected = with_gradients(dense_oracle, [a.double() if a.is_floating_point() else a for a in args], *options)
    args[2] = args[2].float()
    with force(implementation):
        found = with_gradients(call, args, *options)
    for ours, given_, exact in zip(found, [args[0], args[0], *args[2:]], expected):
        assert ours.dtype == given_.dtype
        assert float((ours.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_experts_and_no_tokens(implementation):
    args = [a.float() if a.is_floating_point() else a for a in operands(9, 8, 6, 40, 2)]
    used = args[1].flatten().unique()
    unused = [e for e in range(40) if e not in used]
    with force(implementation):
        found = with_gradients(call, args, *ACTIVATIONS[0])
        nothing = [a[:0] if i < 3 else a for i, a in enumerate(args)]
        empty = with_gradients(call, nothing, *ACTIVATIONS[0])
    assert all((dw[unused] == 0).all() and dw[used].any() for dw in found[3:])
    assert empty[0].shape == (0, 8) and all((dw == 0).all() for dw in empty[3:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_expert_with_more_rows_than_a_block(implementation):
    args = operands(1300, 8, 6, 3, 1, favourite=1)
    expected = with_gradients(dense_oracle, args, *ACTIVATIONS[0])
    with force(implementation):
        found = with_gradients(call, [a.float() if a.is_floating_point() else a for a in args], *ACTIVATIONS[0])
    for ours, exact in zip(found, expected):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=5e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_t41_memory_that_held_nan_leaves_no_trace(implementation):
    """A grouped product whose tail rows are never written returned whatever the allocator held."""
    args = [a.float() if a.is_floating_point() else a for a in operands(50, 16, 12, 30, 2)]
    with force(implementation):
        for _ in range(3):
            poison = [
                torch.full((n,), float("nan")) for n in (50 * 16, 100 * 16, 100 * 12, 30 * 16 * 12) for _ in range(6)
            ]
            del poison
            assert all(t.isfinite().all() for t in with_gradients(call, args, *ACTIVATIONS[0]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_repeat_bitwise_for_any_thread_count(implementation):
    args = [a.float() if a.is_floating_point() else a for a in operands(200, 64, 32, 8, 3)]
    before = torch.get_num_threads()
    try:
        with force(implementation):
            runs = []
            for threads in (1, 2, 2) if implementation == "native" else (1, 1):
                torch.set_num_threads(threads)
                runs.append(with_gradients(call, args, *ACTIVATIONS[0]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_stays_in_its_own_token(implementation):
    args = [a.float() if a.is_floating_point() else a for a in operands(20, 8, 6, 5, 2)]
    args[0][7, 3] = float("nan")
    with force(implementation), torch.no_grad():
        out = routed_experts(*args)
    assert out[7].isnan().all() and out[torch.arange(20) != 7].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 20), st.data())
def test_plan_is_a_stable_sort(tokens, num_experts, data):
    active = data.draw(st.integers(1, num_experts))
    seed = data.draw(st.integers(0, 10**6))
    index_NA = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(seed)).topk(active).indices
    for implementation in IMPLEMENTATIONS:
        with force(implementation):
            plan = dispatch_plan(index_NA, num_experts)
        flat = index_NA.flatten().tolist()
        assert plan.slot_R.tolist() == sorted(range(len(flat)), key=lambda r: (flat[r], r))
        assert plan.offset_E1.tolist() == [sum(e < end for e in flat) for end in range(num_experts)] + [len(flat)]
        assert plan.place_R[plan.slot_R].tolist() == list(range(len(flat)))


@pytest.mark.skipif(not HAVE_NATIVE, reason="no native kernels here")
@pytest.mark.parametrize("options", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 256, 128, 32, 4), (8, 33, 7, 5, 2), (3, 70, 45, 9, 8)])
@pytest.mark.parametrize("bf16_hardware", [False, True])
def test_decode_kernels_equal_the_oracle(monkeypatch, shape, options, bf16_hardware):
    monkeypatch.setattr(experts, "multiplies_bf16", lambda: bf16_hardware)
    args = operands(*shape)
    expected = dense_oracle(*args, *options)
    logits, bias = torch.randn(shape[0], shape[3]), torch.randn(shape[3]) * 0.1
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        z, index, weight, *w = (a.to(dtype) if a.is_floating_point() else a for a in args)
        found = call(z, index, weight.float(), *w, *options)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))
        routing = route(logits, bias, shape[4], scaling_factor=2.0)
        separate = call(z, routing.index_NA, routing.weight_NA, *w, *options)
        keywords = {"beta": options[1], "linear_beta": options[2], "scaling_factor": 2.0}
        fused = moe_decode(logits, bias, z, *w, shape[4], options[0], **keywords)
        assert torch.equal(fused, separate)
        with force("torch"):
            by_torch = moe_decode(logits, bias, z, *w, shape[4], options[0], **keywords)
        torch.testing.assert_close(fused, by_torch, rtol=0, atol=tolerance * float(fused.abs().max()))


@pytest.mark.skipif(not HAVE_NATIVE, reason="no native kernels here")
def test_decode_of_a_token_does_not_depend_on_its_batch_or_threads():
    z, index, weight, *w = (a.float() if a.is_floating_point() else a for a in operands(8, 200, 100, 16, 4))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = routed_experts(z, index, weight, *w)
        torch.set_num_threads(1)
        alone = torch.cat([routed_experts(z[n : n + 1], index[n : n + 1], weight[n : n + 1], *w) for n in range(8)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)


@pytest.mark.skipif(not HAVE_NATIVE, reason="no native kernels here")
@pytest.mark.parametrize("options", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width", "hidden"), [(1, 64, 96), (5, 33, 17), (8, 256, 40)])
def test_a_gated_mlp_is_an_expert_that_every_token_visits(tokens, width, hidden, options):
    z, index, _, w1, w3, w2 = operands(tokens, width, hidden, 1, 1)
    expected = dense_oracle(z, index, torch.ones(tokens, 1, dtype=torch.float64), w1, w3, w2, *options)
    activation, beta, linear_beta = options
    found = mlp_decode(*(t.float() for t in (z, w1[0], w3[0], w2[0])), activation, beta=beta, linear_beta=linear_beta)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
    with force("torch"):
        assert mlp_decode(z.float(), w1[0].float(), w3[0].float(), w2[0].float()) is None


def test_select_says_why(monkeypatch):
    fine, double = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64)
    weights = torch.zeros(3, 4, 4)
    assert experts.select(double, weights.double()).implementation == "torch"
    assert "float64" in experts.select(double, weights.double()).reason
    with force("torch"):
        assert "asked" in experts.select(fine, weights).reason
    if HAVE_NATIVE:
        monkeypatch.setattr(experts, "multiplies_bf16", lambda: True)
        few, many = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(9, 4, dtype=torch.bfloat16)
        halves = weights.bfloat16()
        assert experts.select(few, halves, tracked=False) == decode.select(few, halves)
        for tokens, tracked in ((few, True), (many, False)):
            assert "hardware" in experts.select(tokens, halves, tracked=tracked).reason
    with pytest.raises(ConfigError, match="relu"):
        routed_experts(fine, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), weights, weights, weights, "relu")


def test_tensors_without_memory_take_the_torch_path():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        z, w1 = torch.zeros(4, 8), torch.zeros(3, 6, 8)
        assert "FakeTensor" in experts.select(z, w1).reason
        assert "FakeTensor" in native.why_not(z, dtypes=(torch.float32,))
    assert "meta" in experts.select(torch.zeros(2, 2, device="meta"), torch.zeros(1, 2, 2, device="meta")).reason
