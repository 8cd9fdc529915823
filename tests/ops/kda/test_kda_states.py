"""States inside a sequence equal the final states of its beginnings."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from kda_cases import IN_KERNEL, raw_inputs, relative_error

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, chunk_kda_states, packed_kda_states

GATES = ({"lower_bound": -5.0}, {})


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("offsets", [[1, 16, 50], [70], [], [3, 70]])
@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_states_are_those_of_the_beginnings(
    gate: dict[str, float], v_first: bool, offsets: list[int], implementation: str
) -> None:
    inputs = {name: x.float() for name, x in raw_inputs(2, 70, 2, 2, 16, 8).items()}
    if v_first:
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    options = IN_KERNEL | gate | {"state_v_first": v_first}
    sequence = {name: inputs.pop(name) for name in ("q", "k", "v", "g", "beta")}
    with torch.no_grad(), force(implementation):
        o, final, states = chunk_kda_states(**sequence, offsets=offsets, **inputs, **options)
        truth, last = chunk_kda(**sequence, **inputs, **options, output_final_state=True)
        assert states.shape == (len(offsets), *final.shape) and states.dtype == torch.float32
        assert relative_error(o, truth.double()) < 1e-5 and relative_error(final, last.double()) < 1e-5
        for offset, state in zip(offsets, states, strict=True):
            beginning = {name: x[:, :offset] for name, x in sequence.items()}
            _, expected = chunk_kda(**beginning, **inputs, **options, output_final_state=True)
            assert relative_error(state, expected.double()) < 1e-5


@pytest.mark.parametrize("offsets", [[0], [5, 5], [9, 3], [71]])
def test_offsets_that_make_no_sense(offsets: list[int]) -> None:
    inputs = raw_inputs(1, 70, 1, 1, 16, 16)
    with pytest.raises(ConfigError, match="ascend within 1..70"):
        chunk_kda_states(**inputs, offsets=offsets, **IN_KERNEL, lower_bound=-5.0)


def packed(lengths: tuple[int, ...], v_first: bool):
    """Sequences packed into one row, boundaries, what goes with them, and each alone."""
    cuts = (0, *accumulate(lengths))
    inputs = {name: x.float() for name, x in raw_inputs(1, cuts[-1], 2, 2, 16, 16).items()}
    sequence = {name: inputs.pop(name) for name in ("q", "k", "v", "g", "beta")}
    inputs["initial_state"] = torch.randn(len(lengths), *inputs["initial_state"].shape[1:])
    options = IN_KERNEL | inputs | {"lower_bound": -5.0, "state_v_first": v_first}
    alone = [
        ({name: x[:, begin:end] for name, x in sequence.items()}, options | {"initial_state": state[None]})
        for (begin, end), state in zip(pairwise(cuts), options["initial_state"])
    ]
    return sequence, cuts, options, alone


@pytest.mark.parametrize("marks", [[(0, 5), (0, 20), (2, 33)], [], [(1, 1), (2, 64)]])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_packed_sequences_are_each_alone(marks: list[tuple[int, int]], v_first: bool, implementation: str) -> None:
    sequence, cuts, options, alone = packed((20, 1, 70), v_first)
    with torch.no_grad(), force(implementation):
        o, finals, states = packed_kda_states(**sequence, cu_seqlens=cuts, marks=marks, **options)
        assert states.shape == (len(marks), *finals.shape[1:])
        for (begin, end), final, (part, own) in zip(pairwise(cuts), finals, alone):
            truth, last = chunk_kda(**part, **own, output_final_state=True)
            assert relative_error(o[:, begin:end], truth.double()) < 1e-5
            assert relative_error(final, last[0].double()) < 1e-5
        for (n, tokens), state in zip(marks, states, strict=True):
            part, own = alone[n]
            _, expected = chunk_kda(**{x: t[:, :tokens] for x, t in part.items()}, **own, output_final_state=True)
            assert relative_error(state, expected[0].double()) < 1e-5


@pytest.mark.parametrize("marks", [[(0, 0)], [(1, 2)], [(3, 1)], [(2, 9), (0, 4)]])
def test_packed_marks_that_make_no_sense(marks: list[tuple[int, int]]) -> None:
    sequence, cuts, options, _ = packed((20, 1, 70), False)
    with pytest.raises(ConfigError, match="must ascend, and lie in sequences of"):
        packed_kda_states(**sequence, cu_seqlens=cuts, marks=marks, **options)
