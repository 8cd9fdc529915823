"""States inside a sequence out of the forward scan; see `ops.kda.states`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.kda.arguments import Arguments
from perilune.ops.kda.gpu import known
from perilune.ops.kda.gpu.forms import lay_out
from perilune.ops.kda.gpu.forward import Setting, flat, forward
from perilune.ops.kda.gpu.padded_plan import place_marks
from perilune.ops.kda.gpu.plan import CHUNK, Filling, keep_if_recorded, on_device


class Exports(NamedTuple):
    """Where the scan writes states: `slot` int32 `[chunks]`, the place of the state behind a chunk or -1; `state` float32
    `[slots, HV, V, K]`."""

    slot: Tensor
    state: Tensor


@lru_cache(maxsize=64)
def _slots(
    offsets: tuple[int, ...], marks: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Filling | None]:
    """`Exports.slot` of these marks, with `plan.Filling`: the same for all layers of a pass, none of which waits for the device."""
    chunks = sum(-(-(end - begin) // CHUNK) for begin, end in pairwise(offsets))
    return on_device(place_marks(offsets, marks, chunks), device)


def kda_gpu_states(args: Arguments, marks: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels without gradients; `marks` are pairs of a sequence and a multiple of a chunk inside it."""
    slots, filling = _slots(args.offsets, tuple(marks), args.q.device)
    if filling is not None:
        filling.wait()
    keep_if_recorded(slots)
    return kda_gpu_planned(args, slots, len(marks))


def kda_gpu_planned(args: Arguments, slots: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same where the device knows what is wanted: `count` states, those of `slots`; see `Exports`."""
    shape = (count, args.heads, args.value_dim, args.key_dim)
    exports = Exports(slots, torch.empty(shape, dtype=torch.float32, device=args.q.device))
    given = (args.q, args.k, args.v, args.g, args.beta, args.A_log, args.dt_bias, args.initial_state)
    form = None if args.plan is not None else _form(args, given)
    if form is not None:
        o, final, _ = form(*given, *exports)
    else:
        A_log, dt_bias = (None if t is None else t.contiguous() for t in (args.A_log, args.dt_bias))
        with torch.cuda.device_of(args.q):
            inputs = (flat(t) for t in given[:5])
            found = forward(*inputs, A_log, dt_bias, args.initial_state, Setting.of(args, False), exports)
        o, final = found.o.view(args.v.shape), found.final
    assert final is not None, "the final state was asked for"
    states = exports.state if args.state_v_first else exports.state.transpose(-1, -2).contiguous()
    return o, final, states


def _form(args: Arguments, given: tuple[Tensor | None, ...]) -> known.Known | None:
    """The forward pass of calls like this one; None if it has no form."""
    key = known.key_of(
        *given, "states", args.scale, args.l2_norm, args.gate, args.lower_bound, args.bounded, args.beta_sigmoid,
        args.beta_scale, args.state_v_first, args.output_final_state, args.offsets,
    )  # fmt: skip
    if not known.is_decided(key):
        form = lay_out(args, False)
        known.remember(key, None if form is None else form.forward)
    return known.find(key)
