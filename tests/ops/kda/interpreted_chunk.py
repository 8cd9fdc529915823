"""The chunk kernels against the float64 token loop: forward and every gradient, layouts, gates, segments, traps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from kda_cases import IN_KERNEL, assert_close, outputs_and_gradients, raw_inputs, reference, relative_error
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import Launch, emulated, emulator
from perilune.ops.kda import chunk_kda, chunk_kda_states, packed_kda_states, recurrent_kda_reference, select
from perilune.ops.kda.api import choose
from perilune.ops.kda.arguments import check
from perilune.ops.kda.gpu import forward
from perilune.ops.kda.triton import configs

BOUNDED = IN_KERNEL | {"lower_bound": -5.0, "safe_gate": True}


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with force("triton"):
        yield


@pytest.fixture(autouse=True)
def _slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "SLAB", 3)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sequences into segments of one chunk."""
    monkeypatch.setattr(forward, "fastest", lambda offsets, heads, value_dim, *_: (1, value_dim))


def transposed_state(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return inputs | {"initial_state": inputs["initial_state"].transpose(-1, -2).contiguous()}


def test_gradients_of_the_bounded_gate() -> None:
    inputs = raw_inputs(1, 70, 1, 1, 32, 16)
    assert_close(outputs_and_gradients(chunk_kda, inputs, torch.float32, **BOUNDED), reference(inputs, **BOUNDED), 1e-4)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_gradients_of_any_size_keep_their_precision(size: float) -> None:
    """Beside a gate that stays open, cotangents of a loss averaged over many tokens met factors that they did not survive."""
    inputs = raw_inputs(1, 64, 1, 1, 16, 16)
    inputs["g"][:] = -15.0

    def gradients(size: float) -> list[Tensor]:
        leaves = [x.float().requires_grad_() for x in inputs.values()]
        o, _ = chunk_kda(**dict(zip(inputs, leaves)), **BOUNDED)
        return torch.autograd.grad(o, leaves, size * torch.ones_like(o))

    for name, got, expected in zip(inputs, gradients(size), gradients(1.0)):
        assert relative_error(got.double() / size, expected.double()) < 1e-4, name


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
def test_the_cuda_kernels_take_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 through the whole function: the CUDA kernels, emulated."""
    launched: list[str] = []
    launch = Launch.__call__
    monkeypatch.setattr(
        Launch, "__call__", lambda self, *args: (launched.append(self.kernel.entry), launch(self, *args))[1]
    )
    inputs = raw_inputs(1, 100, 1, 2, 64, 64)
    inputs = {n: x.bfloat16().double() if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}

    def mixed(**leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        low = {n: x.bfloat16() if n in ("q", "k", "v", "g", "beta") else x for n, x in leaves.items() if n in inputs}
        low["initial_state"] = low["initial_state"].double()  # taken, and computed in float32
        with emulated():
            return chunk_kda(**low, **{n: x for n, x in leaves.items() if n not in inputs})

    with emulated():
        got = outputs_and_gradients(mixed, inputs, torch.float32, **BOUNDED)
    truth = reference(inputs, **BOUNDED)
    assert {"prepare", "scan", "scan_backward", "backward"} <= set(launched)
    for name in truth:
        assert relative_error(got[name].double(), truth[name]) < 1.5e-2, name


def test_gradients_with_two_value_heads_a_key_head_and_two_rows() -> None:
    inputs = transposed_state(raw_inputs(2, 17, 1, 2, 32, 64))
    options = BOUNDED | {"state_v_first": True, "scale": 0.3}
    assert_close(outputs_and_gradients(chunk_kda, inputs, torch.float32, **options), reference(inputs, **options), 1e-4)


def test_gradients_of_the_softplus_gate() -> None:
    inputs = raw_inputs(1, 65, 1, 1, 32, 16)
    inputs["g"] *= 6.0  # decays down to e^-30 a step
    inputs["g"][:, ::9] = -120.0  # e^x is 0 in float32, and so is what divides by it
    got = outputs_and_gradients(chunk_kda, inputs, torch.float32, **IN_KERNEL)
    assert_close(got, reference(inputs, **IN_KERNEL), 1e-4)


def test_gradients_of_values_taken_as_they_are() -> None:
    """No gate, no norm, no sigmoid in the kernel; a write strength of 0 still has a gradient."""
    inputs = raw_inputs(1, 40, 1, 1, 32, 16)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["g"], inputs["beta"] = (-5 * torch.sigmoid(inputs["g"])).float().double(), inputs["beta"].sigmoid()
    inputs["q"], inputs["k"] = inputs["q"] / 6, torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs["beta"][:, ::3] = 0.0
    inputs = {n: x.float().double() for n, x in inputs.items()}
    got = outputs_and_gradients(chunk_kda, inputs, torch.float32, safe_gate=True)
    assert_close(got, reference(inputs, safe_gate=True), 1e-4)


def test_gradients_of_packed_sequences_with_empty_ones() -> None:
    inputs = raw_inputs(1, 150, 1, 1, 32, 16, sequences=5)
    inputs["dt_bias"] = torch.stack([inputs["dt_bias"]] * 2, dim=-1)[..., 0]  # with a stride
    options = BOUNDED | {"cu_seqlens": torch.tensor([0, 0, 20, 84, 84, 150])}
    assert_close(outputs_and_gradients(chunk_kda, inputs, torch.float32, **options), reference(inputs, **options), 1e-4)


def test_gradients_do_not_depend_on_segments(segments: None) -> None:
    inputs = transposed_state(raw_inputs(1, 330, 1, 1, 32, 16, sequences=2))
    inputs["g"] -= 9.0  # half-lives of hundreds of tokens, or nothing would pass from one segment to the next
    options = BOUNDED | {"cu_seqlens": torch.tensor([0, 250, 330]), "state_v_first": True}
    args = check(**inputs, **options)
    assert forward.planned(forward.Setting.of(args, False), 1, 32, 16, torch.device("cpu"), False).unit_count == 6
    assert_close(outputs_and_gradients(chunk_kda, inputs, torch.float32, **options), reference(inputs, **options), 1e-4)


def test_t04_composition_of_many_segments_keeps_float32(segments: None) -> None:
    inputs = raw_inputs(1, 64 * 12, 1, 1, 32, 16)
    inputs["g"] -= 9.0  # half-lives of hundreds of tokens
    options = BOUNDED | {"output_final_state": True}
    truth, state = recurrent_kda_reference(**inputs, **options)
    o, final = chunk_kda(**{n: x.float() for n, x in inputs.items()}, **options)
    assert relative_error(o, truth) < 4e-6 and relative_error(final, state) < 4e-6


def test_t01_later_tokens_do_not_move_earlier_ones() -> None:
    first = {n: x.float() for n, x in raw_inputs(1, 130, 1, 1, 32, 16).items()}
    second = {n: x.clone() for n, x in first.items()}
    for name in ("q", "k", "v", "g", "beta"):
        second[name][:, 75:] = torch.randn_like(second[name][:, 75:])
    results = []
    for inputs in (first, second):
        leaves = {n: x.requires_grad_() for n, x in inputs.items()}
        o, _ = chunk_kda(**leaves, **BOUNDED)
        gradients = torch.autograd.grad(o[:, :75].sum(), [leaves[n] for n in ("q", "k", "v", "g", "beta")])
        results.append([o[:, :75], *(x[:, :75] for x in gradients)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("doubled", [False, True])
def test_t02_one_key_repeated_with_slow_decay(doubled: bool) -> None:
    inputs = raw_inputs(1, 192, 1, 1, 32, 16)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["g"][:], inputs["beta"][:] = -12.0, 8.0
    options = BOUNDED | {"allow_neg_eigval": doubled}
    # doubled, the eigenvalue along the key is -0.999, and rounding is not forgotten
    assert_close(
        outputs_and_gradients(chunk_kda, inputs, torch.float32, **options),
        reference(inputs, **options),
        2e-3 if doubled else 2e-4,
    )


@pytest.mark.parametrize("logit", [-40.0, 40.0])
def test_gates_at_either_end(logit: float) -> None:
    """Decays of e^-5 in every channel use the whole range of the shifted factors; decays of 1 the other end of it."""
    inputs = raw_inputs(1, 70, 1, 1, 32, 16)
    inputs["g"][:] = logit
    truth, _ = recurrent_kda_reference(**inputs, **BOUNDED)
    o, _ = chunk_kda(**{n: x.float() for n, x in inputs.items()}, **BOUNDED)
    assert relative_error(o, truth) < 3e-6


def test_t51_bfloat16_operands_are_multiplied_as_float32() -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds, so 4e-3 become 2e-2; its own product is wrong by 1e9."""
    inputs = {
        n: x.bfloat16() if x.dim() > 2 and n != "initial_state" else x.float()
        for n, x in raw_inputs(1, 70, 1, 1, 32, 16).items()
    }
    truth, _ = recurrent_kda_reference(**{n: x.double() for n, x in inputs.items()}, **BOUNDED)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    o, _ = chunk_kda(**leaves, **BOUNDED)
    assert o.dtype == torch.bfloat16 and relative_error(o.detach(), truth) < 3e-2
    gradients = torch.autograd.grad(o.float().sum(), list(leaves.values()))
    assert all(g.dtype == x.dtype and torch.isfinite(g).all() for g, x in zip(gradients, leaves.values()))


def test_strided_inputs_are_read_in_place_and_nothing_beside_them() -> None:
    """q, k, v as parts of one projection, NaN between them and around them."""
    inputs = raw_inputs(1, 40, 1, 1, 32, 32)
    packed = torch.full((1, 40, 1, 224), float("nan"))
    views = {"q": packed[..., 32:64], "k": packed[..., 96:128], "v": packed[..., 160:192]}
    for name, view in views.items():
        view.copy_(inputs[name])
    truth = chunk_kda(**{n: x.float() for n, x in inputs.items()}, **BOUNDED)[0]
    o, _ = chunk_kda(**{n: views.get(n, x.float()) for n, x in inputs.items()}, **BOUNDED)
    assert torch.equal(o, truth)
    assert all(forward.flat(view).data_ptr() == view.data_ptr() for view in views.values())


def test_one_decay_a_head_spread_over_the_channels() -> None:
    """Gated DeltaNet's call: no stride between the channels of g."""
    inputs = {n: x.float() for n, x in raw_inputs(1, 40, 1, 1, 32, 16).items()}
    spread = inputs["g"][..., :1].expand_as(inputs["g"])
    o, _ = chunk_kda(**inputs | {"g": spread}, **BOUNDED)
    assert torch.equal(o, chunk_kda(**inputs | {"g": spread.contiguous()}, **BOUNDED)[0])


def test_every_element_of_the_buffers_is_written(poisoned_memory: None) -> None:
    inputs = raw_inputs(1, 70, 1, 1, 32, 16, sequences=2)
    options = BOUNDED | {"cu_seqlens": torch.tensor([0, 67, 70])}
    got = outputs_and_gradients(chunk_kda, inputs, torch.float32, **options)
    assert all(torch.isfinite(x).all() for x in got.values())
    again = outputs_and_gradients(chunk_kda, inputs, torch.float32, **options)
    assert all(torch.equal(got[n], again[n]) for n in got), "not repeatable"


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("bounded", [True, False])
def test_nan_reaches_the_outputs_and_stays_in_its_sequence(poisoned: str, bounded: bool) -> None:
    inputs = {n: x.float() for n, x in raw_inputs(1, 24, 1, 1, 32, 16, sequences=2).items()}
    inputs[poisoned][:, 5] = float("nan")
    options = (BOUNDED if bounded else IN_KERNEL) | {
        "cu_seqlens": torch.tensor([0, 10, 24]),
        "output_final_state": True,
    }
    o, state = chunk_kda(**inputs, **options)
    assert torch.isnan(o[:, 5]).all(), "hidden"
    assert torch.isfinite(o[:, 10:]).all() and torch.isfinite(state[1]).all(), "reached the other sequence"
    assert poisoned == "q" or torch.isnan(state[0]).any(), "lost on the way to the state"


def test_no_tokens_leave_the_state_as_it_is() -> None:
    inputs = {n: x.float() for n, x in raw_inputs(1, 0, 1, 1, 32, 16).items()}
    o, state = chunk_kda(**inputs, output_final_state=True, **BOUNDED)
    assert o.shape == (1, 0, 1, 16) and torch.equal(state, inputs["initial_state"])


def test_choice_says_why() -> None:
    assert select("cpu", torch.float32).implementation == "triton"
    inputs = {n: x.float() for n, x in raw_inputs(1, 3, 1, 1, 20, 16).items()}
    choice = choose(check(**inputs, **BOUNDED))
    assert choice.implementation == "torch" and "powers of 2" in choice.reason and "20" in choice.reason
    assert "float64" in select("cpu", torch.float64).reason


def test_states_inside_a_sequence(segments: None) -> None:
    """Written by the scan, in both layouts, with and without segments; elsewhere in pieces."""
    inputs = {name: x.float() for name, x in raw_inputs(2, 200, 1, 1, 16, 16).items()}
    sequence = {name: inputs.pop(name) for name in ("q", "k", "v", "g", "beta")}
    options = BOUNDED | inputs
    for offsets in ([64, 192], [128], [50, 64]):
        with torch.no_grad():
            o, final, states = chunk_kda_states(**sequence, offsets=offsets, **options)
            truth, last = chunk_kda(**sequence, **options, output_final_state=True)
            assert relative_error(o, truth.double()) < 1e-5 and relative_error(final, last.double()) < 1e-5
            for offset, state in zip(offsets, states, strict=True):
                beginning = {name: x[:, :offset] for name, x in sequence.items()}
                _, expected = chunk_kda(**beginning, **options, output_final_state=True)
                assert relative_error(state, expected.double()) < 1e-5


def test_states_inside_packed_sequences(segments: None) -> None:
    inputs = {name: x.float() for name, x in raw_inputs(1, 215, 1, 1, 16, 16).items()}
    sequence = {name: inputs.pop(name) for name in ("q", "k", "v", "g", "beta")}
    options = BOUNDED | inputs
    cuts, before = (0, 70, 75, 215), torch.randn(3, *inputs["initial_state"].shape[1:])
    marks = [(0, 64), (2, 64), (2, 128)]
    with torch.no_grad():
        o, finals, states = packed_kda_states(
            **sequence, cu_seqlens=cuts, marks=marks, **options | {"initial_state": before}
        )
        for n, (begin, end) in enumerate(pairwise(cuts)):
            alone = (
                {name: x[:, begin:end] for name, x in sequence.items()},
                options | {"initial_state": before[n : n + 1]},
            )
            truth, last = chunk_kda(**alone[0], **alone[1], output_final_state=True)
            assert relative_error(o[:, begin:end], truth.double()) < 1e-5
            assert relative_error(finals[n], last[0].double()) < 1e-5
            for state, tokens in ((state, tokens) for state, (m, tokens) in zip(states, marks) if m == n):
                beginning = {name: x[:, :tokens] for name, x in alone[0].items()}
                _, expected = chunk_kda(**beginning, **alone[1], output_final_state=True)
                assert relative_error(state, expected[0].double()) < 1e-5
