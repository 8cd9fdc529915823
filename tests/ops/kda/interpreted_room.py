"""Tables with room for more sequences than there are: the same values, gradients and states, from poisoned memory."""

from __future__ import annotations

import pytest
import torch
from guarded_memory import GuardedMemory
from kda_cases import IN_KERNEL, raw_inputs, relative_error
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.kda import Planned, chunk_kda, packed_kda_states, planned_kda_states
from perilune.ops.kda.gpu.padded_plan import NEVER, Room, place_marks
from perilune.ops.kda.gpu.plan import Plan

BOUNDED = IN_KERNEL | {"lower_bound": -5.0, "safe_gate": True}
OFFSETS = (0, 20, 90)


def values_and_gradients(
    inputs: dict[str, Tensor], bounds: Tensor, plan: Plan | None, **options: object
) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with force("triton"):
        o, _ = chunk_kda(**leaves, **options, cu_seqlens=bounds, plan=plan)
        o.backward(torch.linspace(-1, 1, o.numel()).view(o.shape).to(o.dtype))
    return {"o": o.detach()} | {name: x.grad for name, x in leaves.items()}


def with_and_without(
    room: Room, inputs: dict[str, Tensor], **options: object
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By tables with room for more, and by the sequences' own."""
    plan = room.plan(torch.from_numpy(room.filled(OFFSETS)))
    unread = torch.empty(room.sequences + 1, device="meta")  # a step that waits for them cannot be recorded
    padded = values_and_gradients(inputs, unread, plan, **options)
    return padded, values_and_gradients(inputs, torch.tensor(OFFSETS), None, **options)


def test_the_triton_kernels(poisoned_memory: None) -> None:
    """Cut into segments of one chunk; `tests/gpu` has the other settings."""
    inputs = raw_inputs(1, 90, 1, 1, 16, 16, sequences=2)
    del inputs["initial_state"]
    got, plain = with_and_without(Room(90, 3, 1, 16), {n: x.float() for n, x in inputs.items()}, **BOUNDED)
    for name in plain:
        assert relative_error(got[name].double(), plain[name].double()) < 1e-5, name


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("target", [NEVER, 1], ids=["whole", "cut"])
def test_the_cuda_kernels(poisoned_memory: None, target: int, bound: float | None) -> None:
    """Units of chunks without tokens begin with nothing, not with what lies in memory."""
    inputs = raw_inputs(1, 90, 1, 1, 64, 64, sequences=2)
    del inputs["initial_state"]
    low = {n: x.bfloat16() if n in ("q", "k", "v", "g", "beta") else x.float() for n, x in inputs.items()}
    options = IN_KERNEL | {"lower_bound": bound, "safe_gate": bound is not None}
    with emulated():
        got, plain = with_and_without(Room(90, 3, target, 64), low, **options)
    for name in plain:
        if target != NEVER:
            assert relative_error(got[name].double(), plain[name].double()) < 2e-2, name
        elif name in ("A_log", "dt_bias"):  # sums over more chunks, in another order
            assert relative_error(got[name].double(), plain[name].double()) < 1e-6, name
        else:
            assert torch.equal(got[name], plain[name]), name


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("target", [NEVER, 1])
def test_states_in_and_out(target: int, at_end: bool) -> None:
    """Three sequences in a room for five: the last two have no tokens, and keep the states that they came with. In segments, too.

    Units of chunks without tokens belong to no sequence: their entry state would lie in front of the first one.
    """
    offsets, marks = (0, 20, 180, 256), [(1, 64), (1, 128), (2, 64)]
    room, guarded = Room(256, 5, target, 64), GuardedMemory(at_end=at_end)
    inputs = raw_inputs(1, 256, 1, 1, 64, 64, sequences=5)
    low = {n: guarded.of(x.bfloat16() if n in ("q", "k", "v", "g", "beta") else x.float()) for n, x in inputs.items()}
    tensors, initial = [low.pop(name) for name in ("q", "k", "v", "g", "beta")], low.pop("initial_state")
    slots = guarded.of(torch.from_numpy(place_marks(room.boundaries(offsets), marks, room.chunks)))
    numbers, options = guarded.of(torch.from_numpy(room.filled(offsets))), low | BOUNDED
    with force("triton"), emulated(), guarded:
        o, final, states = planned_kda_states(*tensors, Planned(room.plan(numbers), slots, 5, 4), initial, **options)
        expected = packed_kda_states(*tensors, offsets, marks, initial_state=initial[:3], **options)
    for got, want in zip((o, final[:3], states[:3]), expected, strict=True):
        assert torch.equal(got, want) or target != NEVER
        assert relative_error(got.double(), want.double()) < 1e-2
    assert torch.equal(final[3:], initial[3:])


@pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))
def test_a_room_of_fewer_tokens_than_a_chunk() -> None:
    """A unit of nobody has no tokens, wherever it stands: a kernel that took 64 for it would read behind the last of v."""
    offsets, room, guarded = (0, 48, 63), Room(63, 4, 1, 64), GuardedMemory(at_end=True)
    inputs = raw_inputs(1, 63, 1, 1, 64, 64)
    del inputs["initial_state"]
    low = {n: guarded.of(x.bfloat16() if n in ("q", "k", "v", "g", "beta") else x.float()) for n, x in inputs.items()}
    numbers = guarded.of(torch.from_numpy(room.filled(offsets)))
    with force("triton"), emulated(), guarded:
        o, _ = chunk_kda(**low, **BOUNDED, plan=room.plan(numbers))
        expected, _ = chunk_kda(**low, **BOUNDED, cu_seqlens=torch.tensor(offsets))
    assert relative_error(o.double(), expected.double()) < 1e-2
