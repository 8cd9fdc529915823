"""The chunked torch form equals the float64 recurrence: outputs, states and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import IN_KERNEL, assert_close, outputs_and_gradients, raw_inputs, reference

from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, recurrent_kda_reference

TOLERANCE = 1e-12


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 135, 256])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_equals_the_recurrence_at_every_length(length: int, lower_bound: float | None) -> None:
    options = IN_KERNEL | {"lower_bound": lower_bound}
    inputs = raw_inputs(1, length, 1, 2, 8, 6)
    truth = reference(inputs, **options)
    for chunk_size in (16, 64) if length > 16 else (16,):
        got = outputs_and_gradients(chunk_kda, inputs, torch.float64, chunk_size=chunk_size, **options)
        assert_close(got, truth, TOLERANCE)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_heads_groups_and_chunk_sizes(chunk_size: int, heads: tuple[int, int], lower_bound: float | None) -> None:
    options = IN_KERNEL | {"lower_bound": lower_bound, "allow_neg_eigval": True}
    inputs = raw_inputs(2, 70, *heads, 12, 20)
    got = outputs_and_gradients(chunk_kda, inputs, torch.float64, chunk_size=chunk_size, **options)
    assert_close(got, reference(inputs, **options), TOLERANCE)


def _pinned(kind: str) -> dict[str, torch.Tensor]:
    inputs = raw_inputs(1, 70, 2, 2, 8, 10)
    if kind == "closed":  # every decay at the bound
        inputs["g"] += 40.0
    elif kind == "open":  # hardly any decay
        inputs["g"] -= 40.0
    elif kind == "half":  # half of the channels at each end
        inputs["g"] += torch.tensor([40.0] * 4 + [-40.0] * 4, dtype=torch.float64)
    elif kind == "repeated keys":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
        inputs["g"] -= 12.0
        inputs["beta"] += 8.0
    elif kind == "correlated keys":
        inputs["k"] = 0.9 * inputs["k"][:, :1] + 0.435 * inputs["k"]
        inputs["beta"] += 8.0
    elif kind == "no writes":
        inputs["beta"] -= 40.0
    return inputs


KINDS = ["closed", "open", "half", "repeated keys", "correlated keys", "no writes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_gates_keys_and_writes(kind: str, lower_bound: float | None) -> None:
    options = IN_KERNEL | {"lower_bound": lower_bound}
    inputs = _pinned(kind)
    truth = reference(inputs, **options)
    for chunk_size in (16, 64):
        got = outputs_and_gradients(chunk_kda, inputs, torch.float64, chunk_size=chunk_size, **options)
        small = {"d_g", "d_A_log", "d_dt_bias"} if kind == "closed" else set()  # products of numbers near e^-80
        assert_close(got, {n: x for n, x in truth.items() if n not in small}, TOLERANCE)
        for name in small:
            scale = max(1.0, truth["d_k"].abs().max().item())
            assert (got[name] - truth[name]).abs().max() <= TOLERANCE * scale, name


def test_log_decays_given_directly_including_minus_infinity() -> None:
    inputs = raw_inputs(1, 50, 2, 2, 8, 10)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["g"] = -3.0 * inputs["g"].abs()
    inputs["g"][0, 7] = -torch.inf  # the state is forgotten here
    inputs["g"][0, 20, 0, :3] = -torch.inf
    inputs["g"][0, 30] = -2000.0
    inputs["beta"] = inputs["beta"].sigmoid()
    inputs["k"] /= inputs["k"].norm(dim=-1, keepdim=True)
    truth = reference(inputs)
    for chunk_size in (16, 64):
        got = outputs_and_gradients(chunk_kda, inputs, torch.float64, chunk_size=chunk_size)
        assert_close(got, truth, TOLERANCE)


def test_scale_is_applied_to_the_query_alone() -> None:
    inputs = raw_inputs(1, 20, 1, 1, 8, 6)
    for scale in (1.0, 0.3):
        options = IN_KERNEL | {"lower_bound": -5.0, "scale": scale}
        got = outputs_and_gradients(chunk_kda, inputs, torch.float64, **options)
        assert_close(got, reference(inputs, **options), TOLERANCE)


@pytest.mark.parametrize("offsets", [[0, 33, 90, 100], [0, 0, 1, 17, 17, 100, 100], [0, 100], [0, 64, 80, 96, 100]])
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_packed_sequences_equal_separate_ones(offsets: list[int], implementation: str) -> None:
    options = IN_KERNEL | {"lower_bound": -5.0}
    sequences = len(offsets) - 1
    inputs = raw_inputs(1, offsets[-1], 1, 2, 8, 6, sequences=sequences)
    with force(implementation):
        packed = outputs_and_gradients(
            chunk_kda, inputs, torch.float64, cu_seqlens=torch.tensor(offsets, dtype=torch.int32), **options
        )
        alone = chunk_kda(**inputs, output_final_state=True, cu_seqlens_cpu=offsets, **options)
    assert torch.equal(alone[0], packed["o"])
    for n in range(sequences):
        part = {
            x: y[:, offsets[n] : offsets[n + 1]] if x in ("q", "k", "v", "g", "beta") else y for x, y in inputs.items()
        }
        part["initial_state"] = inputs["initial_state"][n : n + 1]
        o, state = recurrent_kda_reference(**part, output_final_state=True, **options)
        assert torch.allclose(packed["o"][:, offsets[n] : offsets[n + 1]], o, rtol=1e-11, atol=1e-12)
        assert torch.allclose(packed["state"][n : n + 1], state, rtol=1e-11, atol=1e-12)
    truth = reference(inputs, cu_seqlens=torch.tensor(offsets), **options)
    assert_close(packed, truth, TOLERANCE)


@pytest.mark.parametrize("implementation", ["torch", "native", "reference"])
def test_both_state_layouts(implementation: str) -> None:
    options = IN_KERNEL | {"lower_bound": -5.0, "output_final_state": True}
    inputs = {
        name: x.float() for name, x in raw_inputs(2, 40, 1, 2, 12, 20).items()
    }  # K != V: a wrong layout cannot fit
    flipped = inputs | {"initial_state": inputs["initial_state"].transpose(-1, -2).contiguous()}
    with force(implementation):
        o, state = chunk_kda(**inputs, **options)
        o_v, state_v = chunk_kda(**flipped, state_v_first=True, **options)
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            o_old, _ = chunk_kda(**flipped, transpose_state_layout=True, **options)
    assert torch.equal(o, o_v) and torch.equal(o, o_old)
    assert state_v.shape == (2, 2, 20, 12) and state_v.dtype == torch.float32
    assert torch.equal(state, state_v.transpose(-1, -2))


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 69), max_size=4), bounded=st.booleans(), chunk_size=st.sampled_from([16, 32, 64]))
def test_any_split_gives_the_same_outputs_and_state(cuts: list[int], bounded: bool, chunk_size: int) -> None:
    options = IN_KERNEL | {"lower_bound": -5.0 if bounded else None, "output_final_state": True}
    inputs = raw_inputs(1, 70, 1, 1, 6, 4)
    whole, final = chunk_kda(**inputs, chunk_size=chunk_size, **options)
    state, pieces = inputs["initial_state"], []
    for begin, end in zip([0, *sorted(set(cuts))], [*sorted(set(cuts)), 70], strict=True):
        part = {x: y[:, begin:end] if x in ("q", "k", "v", "g", "beta") else y for x, y in inputs.items()}
        o, state = chunk_kda(**(part | {"initial_state": state}), chunk_size=chunk_size, **options)
        pieces.append(o)
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=1e-11, atol=1e-12)
    assert torch.allclose(state, final, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("implementation", ["torch", "native", "reference"])
def test_no_tokens(implementation: str) -> None:
    inputs = {name: x.float() for name, x in raw_inputs(2, 1, 1, 1, 8, 6).items()}
    empty = {x: y[:, :0] if x in ("q", "k", "v", "g", "beta") else y for x, y in inputs.items()}
    with force(implementation):
        o, state = chunk_kda(**empty, output_final_state=True, lower_bound=-5.0, **IN_KERNEL)
    assert o.shape == (2, 0, 1, 6)
    assert torch.equal(state, inputs["initial_state"])


def test_gated_deltanet_is_one_decay_a_head() -> None:
    """Gated DeltaNet: S <- a (I - beta k k^T) S + beta k v^T with a scalar a, written out here on its own."""
    inputs = raw_inputs(1, 50, 2, 2, 8, 6)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay = -inputs["g"][..., 0].abs()  # [B, T, H]
    beta = inputs["beta"].sigmoid()
    state, rows = torch.zeros(2, 8, 6, dtype=torch.float64), []
    for t in range(50):
        eye = torch.eye(8, dtype=torch.float64)
        for h in range(2):
            forget = eye - beta[0, t, h] * torch.outer(k[0, t, h], k[0, t, h])
            state[h] = log_decay[0, t, h].exp() * (forget @ state[h]) + beta[0, t, h] * torch.outer(
                k[0, t, h], v[0, t, h]
            )
        rows.append(torch.einsum("hkv,hk->hv", state, q[0, t]) * 8**-0.5)
    g = log_decay.unsqueeze(-1).expand_as(inputs["g"])
    truth = torch.stack(rows).unsqueeze(0)
    for chunk_size in (16, 64):
        o, final = chunk_kda(q, k, v, g, beta, output_final_state=True, chunk_size=chunk_size)
        assert torch.allclose(o, truth, rtol=1e-11, atol=1e-12)
        assert torch.allclose(final[0], state, rtol=1e-11, atol=1e-12)
    o, _ = chunk_kda(*(x.float() for x in (q, k, v, g, beta)))  # the native kernel, where there is one
    assert torch.allclose(o.double(), truth, rtol=1e-5, atol=1e-6)


def test_gated_deltanet_gradients_reach_the_decay_of_each_head() -> None:
    inputs = raw_inputs(1, 40, 2, 2, 8, 6)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        gradients = []
        for op in (recurrent_kda_reference, chunk_kda):
            log_decay = (-inputs["g"][..., 0].abs()).to(dtype if op is chunk_kda else torch.float64).requires_grad_()
            args = [inputs[n].to(log_decay.dtype) for n in ("q", "k", "v")]
            g = log_decay.unsqueeze(-1).expand(*log_decay.shape, 8)
            o, _ = op(*args, g, inputs["beta"].to(log_decay.dtype).sigmoid(), use_qk_l2norm_in_kernel=True)
            gradients.append(torch.autograd.grad(o.square().sum(), log_decay)[0].double())
        assert (gradients[1] - gradients[0]).norm() <= tolerance * gradients[0].norm()
