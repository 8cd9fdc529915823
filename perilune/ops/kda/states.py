"""Prefill that also gives the states after chosen tokens: what a prefix cache keeps of a prompt.

The GPU kernels hold the state of every 64th token in float32 on their way and write those that are wanted, so a
checkpoint costs its bytes and nothing else. Elsewhere, and for other tokens, the sequence is run in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.kda.api import choose, run
from perilune.ops.kda.arguments import Arguments, check
from perilune.ops.kda.gpu.plan import CHUNK, Plan


@torch.compiler.disable
@torch.no_grad()
def chunk_kda_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_kda` of rows without document boundaries, with the states after some of their tokens; no gradient.

    Args:
        q, k, v, g, beta: `[B, T, …]`, see `chunk_kda`.
        offsets: ascending, 1 to T: numbers of tokens after which a state is wanted.
        options: further arguments of `chunk_kda`, but for cu_seqlens and chunk_size.

    Returns:
        `(o [B, T, HV, V], final state [B, HV, K, V], states [n, B, HV, K, V])`, states float32 and in the layout that
        `state_v_first` says.

    Raises:
        ConfigError: an argument does not fit.
    """
    args = check(q, k, v, g, beta, output_final_state=True, **options)
    length = q.shape[1]
    marks = list(offsets)
    if marks != sorted(set(marks)) or marks and not 1 <= marks[0] <= marks[-1] <= length:
        raise ConfigError(f"states are wanted after {marks} tokens; the numbers must ascend within 1..{length}")
    if choose(args).implementation == "triton" and not any(mark % CHUNK for mark in marks):
        from perilune.ops.kda.gpu.states import kda_gpu_states

        o, final, states = kda_gpu_states(args, list(product(range(args.batch), marks)))
        return o, final, states.unflatten(0, (args.batch, len(marks))).transpose(0, 1)
    outs, states, state = [], [], args.initial_state
    for start, end in pairwise([0, *marks] if marks[-1:] == [length] else [0, *marks, length]):
        out, state = run(_piece(args, start, end, state))
        outs.append(out)
        states.append(state)
    assert state is not None, "the final state was asked for"
    found = states[: len(marks)]
    return torch.cat(outs, 1), state, torch.stack(found) if found else state.new_empty(0, *state.shape)


@torch.compiler.disable
@torch.no_grad()
def packed_kda_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Sequence[int], marks: Sequence[tuple[int, int]],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`chunk_kda_states` of N sequences packed into one row, each with marks of its own.

    Args:
        q, k, v, g, beta: `[1, T, …]`.
        cu_seqlens: N+1 boundaries, on the host.
        marks: pairs of a sequence and a number of its tokens, from 1 to its length; ascending.
        options: further arguments of `chunk_kda`; initial_state is `[N, …]`.

    Returns:
        `(o [1, T, HV, V], final states [N, HV, K, V], states [marks, HV, K, V])`, see `chunk_kda_states`.

    Raises:
        ConfigError: an argument does not fit.
    """
    args = check(q, k, v, g, beta, cu_seqlens=cu_seqlens, output_final_state=True, **options)
    lengths = [end - begin for begin, end in pairwise(args.offsets)]
    if list(marks) != sorted(set(marks)) or not all(
        0 <= n < len(lengths) and 1 <= tokens <= lengths[n] for n, tokens in marks
    ):
        raise ConfigError(
            f"states are wanted at {list(marks)}; pairs must ascend, and lie in sequences of {lengths} tokens"
        )
    if not marks:
        o, final = run(args)
        assert final is not None, "the final state was asked for"
        return o, final, final[:0]
    if choose(args).implementation == "triton" and not any(tokens % CHUNK for _, tokens in marks):
        from perilune.ops.kda.gpu.states import kda_gpu_states

        return kda_gpu_states(args, marks)
    initial, outs, finals, states = options.pop("initial_state", None), [], [], []
    for n, (begin, end) in enumerate(pairwise(args.offsets)):
        part = (x[:, begin:end] for x in (q, k, v, g, beta))
        own = [tokens for sequence, tokens in marks if sequence == n]
        found = chunk_kda_states(*part, own, initial_state=None if initial is None else initial[n : n + 1], **options)
        outs.append(found[0])
        finals.append(found[1])
        states.append(found[2].flatten(0, 1))
    return torch.cat(outs, 1), torch.cat(finals), torch.cat(states)


@dataclass(frozen=True)
class Planned:
    """N sequences in one row whose boundaries and marks only the device knows: what a CUDA graph reads when it runs.

    Attributes:
        plan: their chunks, in tables with room for others (`gpu.padded_plan`).
        slots: int32, of each chunk the number of the state that is wanted behind it, or -1.
        sequences, marks: how many there may be; all states are written, those of marks that are not there mean nothing.
    """

    plan: Plan
    slots: Tensor
    sequences: int
    marks: int


@torch.compiler.disable
@torch.no_grad()
def planned_kda_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, planned: Planned, initial_state: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`packed_kda_states` for tables on the device; the same arguments and results, by the GPU kernels alone.

    Raises:
        ConfigError: an argument does not fit, or the kernels do not take the call.
    """
    from perilune.ops.kda.gpu.states import kda_gpu_planned

    args = check(q, k, v, g, beta, output_final_state=True, **options)
    if (choice := choose(args)).implementation != "triton":
        raise ConfigError(f"tables on a device are for the kernels of a GPU, not for this call: {choice.reason}")
    if q.shape[0] != 1 or len(initial_state) != planned.sequences:
        raise ConfigError(
            f"{planned.sequences} sequences need one row and as many states, not {q.shape[0]} and {len(initial_state)}"
        )
    count = (0,) * planned.sequences + (q.shape[1],)  # as many, which is all that is read of them beside a plan
    args = replace(args, initial_state=initial_state, plan=planned.plan, offsets=count)
    return kda_gpu_planned(args, planned.slots, planned.marks)


def _piece(args: Arguments, start: int, end: int, state: Tensor | None) -> Arguments:
    """The arguments of tokens start .. end of every row, behind `state`."""
    cut = {name: getattr(args, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
    offsets = tuple(row * (end - start) for row in range(args.batch + 1))
    return replace(args, **cut, initial_state=state, offsets=offsets)
