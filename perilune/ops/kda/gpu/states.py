"""States inside a sequence out of the forward scan; see `ops.kda.states`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.kda.arguments import Arguments
from perilune.ops.kda.gpu.forward import Setting, flat, forward
from perilune.ops.kda.gpu.plan import CHUNK


class Exports(NamedTuple):
    """Where the scan writes states: `slot` int32 `[chunks]`, the place of the state behind a chunk or -1; `state` float32
    `[slots, HV, V, K]`."""

    slot: Tensor
    state: Tensor


def kda_gpu_states(args: Arguments, offsets: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels on rows of equal length without gradients; `offsets` are multiples of a chunk."""
    batch, length = args.batch, args.q.shape[1]
    count = -(-length // CHUNK)
    slots = torch.full((batch, count), -1, dtype=torch.int32)
    for place, offset in enumerate(offsets):
        slots[:, offset // CHUNK - 1] = place * batch + torch.arange(batch, dtype=torch.int32)
    device = args.q.device
    shape = (len(offsets) * batch, args.heads, args.value_dim, args.key_dim)
    exports = Exports(slots.flatten().to(device), torch.empty(shape, dtype=torch.float32, device=device))
    A_log, dt_bias = (None if t is None else t.contiguous() for t in (args.A_log, args.dt_bias))
    with torch.cuda.device_of(args.q):
        inputs = (flat(t) for t in (args.q, args.k, args.v, args.g, args.beta))
        found = forward(*inputs, A_log, dt_bias, args.initial_state, Setting.of(args, False), exports)
    assert found.final is not None, "the final state was asked for"
    states = exports.state.unflatten(0, (len(offsets), batch))
    return (
        found.o.view(args.v.shape),
        found.final,
        states if args.state_v_first else states.transpose(-1, -2).contiguous(),
    )
