"""Prefill that also gives the states after chosen tokens: what a prefix cache keeps of a prompt.

The GPU kernels hold the state of every 64th token in float32 on their way and write those that are wanted, so a
checkpoint costs its bytes and nothing else. Elsewhere, and for other tokens, the sequence is run in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.kda.api import choose, run
from perilune.ops.kda.arguments import Arguments, check
from perilune.ops.kda.gpu.plan import CHUNK


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

        return kda_gpu_states(args, marks)
    outs, states, state = [], [], args.initial_state
    for start, end in pairwise([0, *marks] if marks[-1:] == [length] else [0, *marks, length]):
        out, state = run(_piece(args, start, end, state))
        outs.append(out)
        states.append(state)
    assert state is not None, "the final state was asked for"
    found = states[: len(marks)]
    return torch.cat(outs, 1), state, torch.stack(found) if found else state.new_empty(0, *state.shape)


def _piece(args: Arguments, start: int, end: int, state: Tensor | None) -> Arguments:
    """The arguments of tokens start .. end of every row, behind `state`."""
    cut = {name: getattr(args, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
    offsets = tuple(row * (end - start) for row in range(args.batch + 1))
    return replace(args, **cut, initial_state=state, offsets=offsets)
