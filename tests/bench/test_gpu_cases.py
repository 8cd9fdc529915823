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


def test_a_training_row_has_utilisation_and_tokens_a_second() -> None:
    from perilune.bench.gpu_train import TrainCase
    from perilune.bench.harness import matmul_ceiling

    case = TrainCase(
        name="step", shape="", make=lambda: (lambda: sum(range(10_000)), lambda: sum(range(20_000))), flops=1e6, tokens=7
    )  # fmt: skip
    row = case.measure("cpu", 3)
    seconds, peer_seconds = row.ours_ms / 1e3, row.peer_ms / 1e3
    assert row.extra["mfu"] == pytest.approx(1e6 / seconds / matmul_ceiling("cpu", case.dtype))
    assert row.extra["mfu"] == pytest.approx(row.bound_ms / row.ours_ms)
    assert row.extra["peer_tokens_per_second"] == pytest.approx(7 / peer_seconds)
