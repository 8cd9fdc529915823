"""The C kernel against the float64 recurrence, and against the torch form in the same precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import IN_KERNEL, assert_close, outputs_and_gradients, raw_inputs, reference, relative_error

from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, fused_recurrent_kda, recurrent_kda_reference, select
from perilune.ops.kda import native as kda_native
from perilune.ops.native import build
from perilune.ops.native.build import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason("kda") is not None, reason=str(unavailable_reason("kda")))

FLOAT32 = 3e-6  # relative to the float64 recurrence; the decay's parameters sum many cancelling terms
SUMS = {"d_g", "d_A_log", "d_dt_bias"}


def _native(
    inputs: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **options: object
) -> dict[str, torch.Tensor]:
    with force("native"):
        return outputs_and_gradients(chunk_kda, inputs, dtype, **options)


def _check(inputs: dict[str, torch.Tensor], **options: object) -> None:
    truth = reference(inputs, **options)
    got = _native(inputs, **options)
    with force("torch"):
        plain = outputs_and_gradients(chunk_kda, inputs, torch.float32, **options)
    for name, exact in truth.items():
        ours, torchs = relative_error(got[name], exact), relative_error(plain[name], exact)
        limit = max(FLOAT32 * (5 if name in SUMS else 1), 2 * torchs)
        assert ours <= limit, f"{name}: native {ours:.1e}, torch float32 {torchs:.1e}"


def test_select_takes_it_and_says_why() -> None:
    assert select("cpu", torch.float32).implementation == "native"
    assert select("cpu", torch.bfloat16, torch.float32).implementation == "native"
    other = select("cpu", torch.float64)
    assert other.implementation == "torch" and "float64" in other.reason
    assert "meta" in select("meta", torch.float32).reason
    with force("torch"):
        assert select("cpu", torch.float32).implementation == "torch"


def test_without_it_the_torch_form_runs_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "switched_off", lambda: True)
    choice = select("cpu", torch.float32)
    assert choice.implementation == "torch" and "PERILUNE_NATIVE=0" in choice.reason
    inputs = {n: x.float() for n, x in raw_inputs(1, 20, 1, 1, 8, 6).items()}
    o, _ = chunk_kda(**inputs, lower_bound=-5.0, **IN_KERNEL)
    assert torch.isfinite(o).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 135])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_every_length(length: int, lower_bound: float | None) -> None:
    _check(raw_inputs(2, length, 2, 2, 16, 16), **IN_KERNEL, lower_bound=lower_bound)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 8, 6), (2, 4, 12, 20), (1, 2, 33, 65), (1, 1, 64, 128), (1, 1, 128, 32), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_every_shape(sizes: tuple[int, int, int, int], lower_bound: float | None) -> None:
    _check(raw_inputs(1, 70, *sizes), **IN_KERNEL, lower_bound=lower_bound, allow_neg_eigval=True)


def test_largest_heads() -> None:
    _check(raw_inputs(1, 40, 1, 1, 256, 256), **IN_KERNEL, lower_bound=-5.0)


@pytest.mark.parametrize("kind", ["closed", "open", "half", "repeated", "correlated", "strong softplus"])
def test_extreme_gates_and_keys(kind: str) -> None:
    inputs = raw_inputs(1, 150, 2, 2, 16, 12)
    options = IN_KERNEL | {"lower_bound": -5.0}
    if kind == "closed":
        inputs["g"] += 6.0
    elif kind == "open":
        inputs["g"] -= 12.0
    elif kind == "half":
        inputs["g"] += torch.tensor([6.0] * 8 + [-12.0] * 8, dtype=torch.float64)
    elif kind == "repeated":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
        inputs["g"] -= 12.0
        inputs["beta"] += 8.0
    elif kind == "correlated":
        inputs["k"] = 0.9 * inputs["k"][:, :1] + 0.435 * inputs["k"]
        inputs["beta"] += 8.0
    else:  # chunks end early: some channels forget within a few tokens, a few at once
        options["lower_bound"] = None
        inputs["A_log"] += 2.0
        inputs["g"] += 6.0 * (inputs["g"] > 1.0)
    _check(inputs, **options)


def test_log_decays_given_directly_including_minus_infinity() -> None:
    inputs = raw_inputs(1, 100, 2, 4, 8, 10)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["g"] = -3.0 * inputs["g"].abs()
    inputs["g"][0, 7] = -torch.inf
    inputs["g"][0, 20, 0, :3] = -torch.inf
    inputs["g"][0, 16:40, 1] = -90.0
    inputs["g"][0, 64:] *= 1e-4
    inputs["beta"] = inputs["beta"].sigmoid()
    _check(inputs, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("offsets", [[0, 33, 90, 100], [0, 0, 1, 17, 17, 100, 100], [0, 64, 80, 96, 100]])
def test_packed_sequences(offsets: list[int]) -> None:
    inputs = raw_inputs(1, 100, 1, 2, 8, 6, sequences=len(offsets) - 1)
    _check(inputs, **IN_KERNEL, lower_bound=-5.0, cu_seqlens=torch.tensor(offsets))


def test_strided_inputs_are_read_in_place() -> None:
    heads, key_dim, value_dim = 2, 16, 24
    width = heads * (2 * key_dim + value_dim)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(3, 40, width + 5, generator=generator).requires_grad_()
    inputs = {
        n: x.float() for n, x in raw_inputs(3, 40, heads, heads, key_dim, value_dim).items() if n not in ("q", "k", "v")
    }

    def run(copy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        parts = fused[..., :width].split([heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in parts)
        if copy:
            q, k, v = (x.contiguous() for x in (q, k, v))
        o, _ = chunk_kda(q, k, v, **inputs, lower_bound=-5.0, **IN_KERNEL)
        return o.detach(), torch.autograd.grad(o.square().sum(), fused)[0]

    for strided, copied in zip(run(False), run(True), strict=True):
        assert torch.equal(strided, copied)
    transposed = torch.randn(3, heads, 40, key_dim, generator=generator).transpose(1, 2)  # heads outermost: copied
    o, _ = chunk_kda(
        transposed,
        transposed,
        inputs["initial_state"].new_ones(3, 40, heads, value_dim),
        **inputs,
        lower_bound=-5.0,
        **IN_KERNEL,
    )
    again, _ = chunk_kda(
        transposed.contiguous(),
        transposed.contiguous(),
        torch.ones(3, 40, heads, value_dim),
        **inputs,
        lower_bound=-5.0,
        **IN_KERNEL,
    )
    assert torch.equal(o, again)


def test_bfloat16_outside_float32_inside() -> None:
    inputs = raw_inputs(2, 70, 2, 4, 16, 24)
    activations = ("q", "k", "v", "g", "beta")
    rounded = {n: x.bfloat16().double() if n in activations else x for n, x in inputs.items()}
    truth = reference(rounded, **IN_KERNEL, lower_bound=-5.0)
    leaves = {n: (x.bfloat16() if n in activations else x.float()).requires_grad_() for n, x in rounded.items()}
    with force("native"):
        o, state = chunk_kda(**leaves, output_final_state=True, lower_bound=-5.0, **IN_KERNEL)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative_error(o.detach(), truth["o"]) < 3e-3  # one rounding to 8 bits
    assert relative_error(state.detach(), truth["state"]) < 2e-6
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(x.shape, generator=generator) for x in (o, state)]
    cotangents[0] = cotangents[0].bfloat16()
    gradients = torch.autograd.grad([o, state], list(leaves.values()), cotangents)
    double = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    o2, state2 = recurrent_kda_reference(**double, output_final_state=True, lower_bound=-5.0, **IN_KERNEL)
    exact = torch.autograd.grad([o2, state2], list(double.values()), [c.double() for c in cotangents])
    for name, got, want in zip(leaves, gradients, exact, strict=True):
        assert got.dtype == leaves[name].dtype
        assert relative_error(got, want) < 4e-3, name


def test_gradient_of_one_output_alone() -> None:
    inputs = raw_inputs(1, 40, 1, 1, 8, 6)
    for pick in (0, 1):
        gradients = []
        for op, dtype in ((recurrent_kda_reference, torch.float64), (chunk_kda, torch.float32)):
            leaves = {n: x.to(dtype).requires_grad_() for n, x in inputs.items()}
            results = op(**leaves, output_final_state=True, lower_bound=-5.0, **IN_KERNEL)
            found = torch.autograd.grad(results[pick].square().sum(), list(leaves.values()), allow_unused=True)
            gradients.append(found)
        for name, want, got in zip(inputs, *gradients, strict=True):
            want = torch.zeros_like(inputs[name]) if want is None else want
            assert relative_error(got, want) < 2e-5, name


def test_some_inputs_need_no_gradient() -> None:
    inputs = {n: x.float() for n, x in raw_inputs(1, 40, 1, 1, 8, 6).items()}
    v = inputs.pop("v").requires_grad_()
    o, _ = chunk_kda(v=v, **inputs, lower_bound=-5.0, **IN_KERNEL)
    (d_v,) = torch.autograd.grad(o.sum(), v)
    with force("torch"):
        o, _ = chunk_kda(v=v, **inputs, lower_bound=-5.0, **IN_KERNEL)
    assert torch.allclose(d_v, torch.autograd.grad(o.sum(), v)[0], atol=1e-5)


def test_inference_keeps_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {n: x.float().requires_grad_() for n, x in raw_inputs(1, 100, 1, 2, 8, 6).items()}
    kept = []
    call = kda_native._call
    monkeypatch.setattr(kda_native, "_call", lambda entry, struct: (kept.append(struct.kept), call(entry, struct)))
    o, _ = chunk_kda(**inputs, lower_bound=-5.0, **IN_KERNEL)
    with torch.no_grad():
        again, _ = chunk_kda(**inputs, lower_bound=-5.0, **IN_KERNEL)
    assert kept[0] and not kept[1], "states for a backward pass that cannot come"
    assert torch.equal(o, again)


def test_thread_count_and_repetition_change_no_bit() -> None:
    inputs = raw_inputs(2, 100, 2, 2, 16, 12)
    options = IN_KERNEL | {"lower_bound": -5.0}
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            results.append(_native(inputs, **options))
    finally:
        torch.set_num_threads(before)
    for name in results[0]:
        assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), name


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 89), max_size=4), bounded=st.booleans())
def test_any_split_gives_the_same_state_and_the_token_loop_the_same_bits(cuts: list[int], bounded: bool) -> None:
    options = IN_KERNEL | {"lower_bound": -5.0 if bounded else None, "output_final_state": True}
    inputs = {n: x.float() for n, x in raw_inputs(1, 90, 1, 2, 12, 10).items()}
    edges = [0, *sorted(set(cuts)), 90]
    for op, same in ((chunk_kda, False), (fused_recurrent_kda, True)):
        whole, final = op(**inputs, **options)
        state, pieces = inputs["initial_state"], []
        for begin, end in zip(edges, edges[1:], strict=False):
            part = {x: y[:, begin:end] if x in ("q", "k", "v", "g", "beta") else y for x, y in inputs.items()}
            o, state = op(**(part | {"initial_state": state}), **options)
            pieces.append(o)
        pieces = torch.cat(pieces, 1)
        if same:
            assert torch.equal(pieces, whole) and torch.equal(state, final)
        else:
            assert torch.allclose(pieces, whole, rtol=1e-4, atol=1e-5)
            assert torch.allclose(state, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_token_loop_equals_the_reference(lower_bound: float | None, implementation: str) -> None:
    inputs = raw_inputs(2, 37, 2, 4, 20, 12)
    inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    options = IN_KERNEL | {"lower_bound": lower_bound, "output_final_state": True, "state_v_first": True}
    exact = recurrent_kda_reference(**inputs, **options)
    with force(implementation):
        got = fused_recurrent_kda(**{n: x.float() for n, x in inputs.items()}, **options)
    assert_close(dict(zip("os", got, strict=True)), dict(zip("os", exact, strict=True)), 1e-6)
