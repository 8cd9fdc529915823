"""GPU rows: names differ, every one has a bound, and none is built before it is measured. Nothing here needs a GPU."""

from __future__ import annotations

import pytest

from perilune.bench import kernels


@pytest.mark.parametrize("op", [name for name in kernels.OPS if name.endswith("_gpu")])
def test_cases_are_listed_without_a_gpu(op: str) -> None:
    cases = list(kernels.OPS[op]("cuda"))
    assert cases, "a suite without rows"
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two rows would take each other's place in a results file"
    assert all(case.shape for case in cases)
    if op != "generate_gpu":  # whose bound is known once the model is there
        assert all(case.bytes or case.flops for case in cases)
    assert not list(kernels.OPS[op]("cpu"))
