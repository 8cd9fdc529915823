"""Forms of calls: what they may share, what lies in their buffers, and boundaries that are read once."""

from __future__ import annotations

import gc
import weakref
from itertools import combinations
from typing import Any

import pytest
import torch
from kda_cases import relative_error
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.cuda import emulated
from perilune.ops.cuda.emulator import missing
from perilune.ops.kda import boundaries as module
from perilune.ops.kda import recurrent_kda_reference
from perilune.ops.kda.arguments import check
from perilune.ops.kda.boundaries import boundaries
from perilune.ops.kda.gpu import autograd, known, states
from perilune.ops.kda.gpu import plan as plans
from perilune.ops.kda.gpu.forms import PLACE, Parts, lay_out

IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0,
}  # fmt: skip


def tensors(tokens: int = 70, heads: int = 1, dim: int = 64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {name: normal(1, tokens, heads, dim).bfloat16() for name in ("q", "k", "v", "g")}
    return made | {"beta": normal(1, tokens, heads).bfloat16(), "A_log": normal(heads), "dt_bias": normal(heads * dim)}


def key(x: dict[str, Tensor], state: Tensor | None = None, *options: Any) -> Any:
    return known.key_of(*x.values(), state, *options)


def test_calls_that_differ_in_what_decides_have_keys_of_their_own() -> None:
    x = tensors()
    wide = torch.randn(1, 70, 1, 137).bfloat16()
    shifted = torch.zeros(65)[1:]
    state = torch.zeros(1, 1, 64, 64)
    calls = [
        key(x), key(x, None, 1.0), key(x, None, 1.0, (0, 70)), key(x, state), key(x, state.transpose(-1, -2)), key(tensors(71)),
        key(x | {"q": wide[..., :64]}), key(x | {"q": wide[..., 1:65]}), key(x | {"g": x["g"].float()}),
        key(x | {"beta": x["beta"].float()}), key(x | {"A_log": None}), key(x | {"dt_bias": shifted}),
        key(x | {"dt_bias": x["dt_bias"].view(1, 64)}), key(x | {"v": x["v"].clone().requires_grad_()}),
    ]  # fmt: skip
    with force("torch"):
        calls.append(key(x))
    assert len(set(calls)) == len(calls)
    others = {name: t.clone() for name, t in x.items()}
    assert key(others) == key(x)
    with torch.no_grad():
        assert key({n: t.requires_grad_() for n, t in others.items()}) == key(x)


class Elsewhere(Tensor):
    """Passes for a tensor of another device."""

    def get_device(self) -> int:
        return 1


def shifted(x: Tensor) -> Tensor:
    """A copy that begins at no multiple of 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def test_no_two_calls_share_a_key_that_differ_in_one_thing() -> None:
    """In a tensor's size, strides, type, device, or presence; in gradients, boundaries, or an option. Addresses count where kernels
    copy 16 bytes at a time; one key for all of q, k, v and g that are off is enough, as such calls have no form."""
    x, state, options = (
        tensors(heads=2),
        torch.zeros(1, 2, 64, 64),
        (None, False, True, True, True, False, False, -5.0, False),
    )
    wide = {
        n: torch.zeros(*t.shape[:-1], t.shape[-1] + 8, dtype=t.dtype)[..., : t.shape[-1]]
        for n, t in x.items()
        if t.dim() > 1
    }
    apart = {n: torch.zeros(1, 140, *t.shape[2:], dtype=t.dtype)[:, ::2] for n, t in x.items() if t.dim() > 1}
    calls = {"itself": key(x, state, *options, None)}
    for name, t in x.items():
        calls[f"{name} elsewhere"] = key(x | {name: t.as_subclass(Elsewhere)}, state, *options, None)
        calls[f"{name} in float64"] = key(x | {name: t.double()}, state, *options, None)
    for layout, views in (("in wide rows", wide), ("in every second row", apart)):
        calls |= {f"{n} {layout}": key(x | {n: t}, state, *options, None) for n, t in views.items()}
    other = {"A_log": x["A_log"].repeat(2)[::2], "dt_bias": x["dt_bias"].repeat(2)[::2]}
    calls |= {f"{n} in strides": key(x | {n: t}, state, *options, None) for n, t in other.items()}
    calls |= {f"without {n}": key(x | {n: None}, state, *options, None) for n in ("A_log", "dt_bias")}
    calls["dt_bias in rows"] = key(x | {"dt_bias": x["dt_bias"].view(2, 64)}, state, *options, None)
    calls["dt_bias shifted"] = key(x | {"dt_bias": shifted(x["dt_bias"])}, state, *options, None)
    calls["q shifted"] = key(x | {"q": shifted(x["q"])}, state, *options, None)
    states = {
        "none": None, "transposed": state.transpose(-1, -2), "in float64": state.double(), "elsewhere": state.as_subclass(Elsewhere),
        "one of two": torch.zeros(1, 2, 64, 128)[..., :64], "for two": torch.zeros(2, 2, 64, 64),
    }  # fmt: skip
    calls |= {f"state {n}": key(x, t, *options, None) for n, t in states.items()}
    for bounds in ((0, 70), (0, 0, 70), (0, 70, 70), (0, 6, 70), (0, 64, 70)):
        calls[f"boundaries {bounds}"] = key(x, state, *options, bounds)
    changed = (0.5, True, False, False, False, True, True, -4.0, True)
    for n, value in enumerate(changed):
        calls[f"option {n}"] = key(x, state, *options[:n], value, *options[n + 1 :], None)
    with_gradients = [key(x | {n: t.clone().requires_grad_()}, state, *options, None) for n, t in x.items()]
    with_gradients.append(key(x, state.clone().requires_grad_(), *options, None))
    assert len(set(with_gradients)) == 1, "whoever wants gradients"
    calls["with gradients"] = with_gradients[0]
    for form in ("triton", "reference"):
        with force(form):
            calls[f"{form} demanded"] = key(x, state, *options, None)
    same = [(a, b) for a, b in combinations(calls, 2) if calls[a] == calls[b]]
    assert not same, same
    with torch.inference_mode():
        assert key(x, state, *options, None) == calls["itself"], (
            "what needs no gradients is run in the same way everywhere"
        )


def test_only_so_many_forms_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "KEPT", 3)
    monkeypatch.setattr(known, "_known", {})
    for n in range(5):
        known.remember(n, None)
    assert [known.is_decided(n) for n in range(5)] == [False, False, True, True, True]
    known.forget()
    assert not known.is_decided(4)


def test_parts_of_a_buffer_do_not_meet() -> None:
    sizes = (1, PLACE, PLACE + 1, 7)
    parts = Parts(*sizes)
    ends = [begin + size for begin, size in zip(parts.begins, sizes, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, [*parts.begins[1:], parts.bytes], strict=True))
    assert not any(begin % PLACE for begin in parts.begins)
    buffer = torch.empty(parts.bytes, dtype=torch.uint8)
    assert parts.within(buffer) == [buffer.data_ptr() + begin for begin in parts.begins]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_form_holds_for_other_contents_and_addresses_alone() -> None:
    """Outputs and gradients of a second call of a form are bit for bit those of a form laid out for it; a first call's
    tensors are not kept alive."""

    def outcome(form: Any, x: dict[str, Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in x.values()]
        o, _ = autograd._run(form, *leaves, None)
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

    with emulated():
        first, second = tensors(), tensors(seed=1)
        given = {name: t.clone().requires_grad_() for name, t in first.items()}
        form, own = (lay_out(check(**x, **IN_KERNEL), True) for x in (given, second))
        assert form is not None and own is not None
        alive = [weakref.ref(t) for t in given.values()]
        del given
        gc.collect()
        assert not any(t() is not None for t in alive)
        outcome(form, first)
        assert len(form.backwards) == 1
        for a, b in zip(outcome(form, second), outcome(own, second), strict=True):
            assert torch.equal(a, b)
        assert len(form.backwards) == 1, "the backward pass is laid out once"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_calls_without_a_form_take_the_other_way() -> None:
    x = tensors()
    wide = torch.randn(1, 70, 1, 137).bfloat16()
    with emulated():
        for changed in ({"q": wide[..., 1:65]}, {"A_log": x["A_log"].double()}, {"g": x["g"].double()}):
            assert lay_out(check(**x | changed, **IN_KERNEL), False) is None
        assert lay_out(check(**x, **IN_KERNEL | {"lower_bound": None}), True) is not None
        assert lay_out(check(**x, **IN_KERNEL), False) is not None
        assert lay_out(check(**x | {"g": x["g"].float()}, **IN_KERNEL), False) is not None
        assert lay_out(check(**x | {"g": x["g"].float()}, **IN_KERNEL), True) is None, "not differentiated in CUDA"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_final_state_that_alone_is_used() -> None:
    """There is no cotangent of o then."""
    x = tensors()
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    with emulated():
        _, state = autograd.kda_gpu(check(**leaves, **IN_KERNEL, output_final_state=True))
        assert state is not None
        found = torch.autograd.grad(state.sum(), [leaves[n] for n in ("k", "v", "q")])
    doubles = {name: t.double().requires_grad_() for name, t in x.items()}
    _, truth = recurrent_kda_reference(**doubles, **IN_KERNEL, output_final_state=True)
    expected = torch.autograd.grad(truth.sum(), [doubles[n] for n in ("k", "v", "q")], materialize_grads=True)
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(found[:2], expected[:2], strict=True))
    assert not found[2].any()


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_saved_tensors_may_come_back_in_another_layout() -> None:
    """Hooks of saved tensors, which move them to the host for instance, owe nobody an order of rows and tokens."""

    def elsewhere(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() in (3, 4) else x.clone()

    draw = torch.Generator().manual_seed(0)
    low = {n: torch.randn(2, 70, 2, 64, generator=draw).bfloat16() for n in ("q", "k", "v", "g")}
    low["beta"] = torch.randn(2, 70, 2, generator=draw).bfloat16()
    found = []
    for unpack in (lambda x: x, elsewhere):
        leaves = {name: x.clone().requires_grad_() for name, x in low.items()}
        with emulated():
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                o, _ = autograd.kda_gpu(check(**leaves, **IN_KERNEL))
            found.append(torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class OnDevice(Tensor):
    """Passes for a tensor of a device."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_where_states_are_wanted_is_waited_for_and_kept_by_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plan: other streams wait until the table is there, and a graph that reads it may outlive the cache."""

    class Filling:
        waits = 0

        def wait(self) -> None:
            Filling.waits += 1

    tables: list[Tensor] = []

    def on_device(numbers: Any, device: torch.device) -> tuple[Tensor, Filling]:
        tables.append(torch.from_numpy(numbers).as_subclass(OnDevice))
        return tables[-1], Filling()

    monkeypatch.setattr(states, "on_device", on_device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(plans, "_recorded", {})
    states._slots.cache_clear()
    args = check(**tensors(), **IN_KERNEL, output_final_state=True)
    try:
        with emulated():
            for _ in range(2):
                states.kda_gpu_states(args, [(0, 64)])
    finally:
        states._slots.cache_clear()
    assert Filling.waits == 2 and len(tables) == 1
    assert [x for x in plans._recorded.values() if x is tables[0]]


class Counted(Tensor):
    """Counts how often it is read, and passes for a tensor of a device."""

    reads = 0
    is_cpu = False  # type: ignore[assignment]

    def tolist(self) -> Any:
        Counted.reads += 1
        return super().tolist()


def test_boundaries_on_a_device_are_read_once_and_again_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_read", {})
    Counted.reads = 0
    bounds = torch.tensor([0, 3, 9]).as_subclass(Counted)
    assert boundaries(bounds) == boundaries(bounds) == (0, 3, 9) and Counted.reads == 1
    bounds[1] = 4
    assert boundaries(bounds) == (0, 4, 9) and Counted.reads == 2
    other = torch.tensor([0, 9]).as_subclass(Counted)
    assert boundaries(other) == (0, 9) and boundaries(bounds) == (0, 4, 9) and Counted.reads == 3
    many = [torch.tensor([0, n]).as_subclass(Counted) for n in range(20)]
    assert [boundaries(x) for x in many] == [(0, n) for n in range(20)] and len(module._read) == module.KEPT


def test_boundaries_on_the_host() -> None:
    assert boundaries(None) is None
    assert boundaries([0, 2]) == boundaries((0, 2)) == boundaries(torch.tensor([0, 2])) == (0, 2)
    with torch.inference_mode():
        assert boundaries(torch.tensor([0, 5])) == (0, 5)
