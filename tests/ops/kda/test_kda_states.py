"""States inside a sequence equal the final states of its beginnings."""

from __future__ import annotations

import pytest
import torch
from kda_cases import IN_KERNEL, raw_inputs, relative_error

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, chunk_kda_states

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
