"""The backward pass's CUDA kernel on a GPU: against the float64 token loop and against the Triton form on equal inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from test_kda_chunk_gpu import BOUNDED, SUMS, as_text, errors_of, make, run

from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, recurrent_kda_reference
from perilune.ops.kda.cuda import backward
from perilune.ops.kda.gpu import known

CASES = {
    "plain": {},
    "two value heads a key head": {"qk_heads": 1},
    "K 64": {"key_dim": 64},
    "V 64": {"value_dim": 64},
    "K 64, V 64": {"key_dim": 64, "value_dim": 64},
    "closed gate": {"gate": 8.0},
    "open gate": {"gate": -15.0},
    "open gate, one key": {"gate": -15.0, "one_key": True},
    "open gate, small gradients": {"gate": -15.0, "size": 1e-9},
    "closed gate, large gradients": {"gate": 8.0, "size": 1e9},
    "strong writes": {"beta": 9.0},
    "weak writes": {"beta": -20.0},
}


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with force("triton"):
        yield


@contextmanager
def without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(backward, "unsuitable", lambda *args, **kwargs: "for comparison")
        known.forget()
        yield
    known.forget()


def case(
    qk_heads: int = 2, key_dim: int = 128, value_dim: int = 128, gate: float | None = None, beta: float | None = None,
    one_key: bool = False, size: float = 1.0, length: int = 300,
) -> tuple[dict[str, Tensor], float]:  # fmt: skip
    inputs = make(1, length, qk_heads, 2, key_dim, value_dim, sequences=3)
    if gate is not None:
        inputs["g"][:] = gate
    if beta is not None:
        inputs["beta"][:] = beta
    if one_key:
        inputs["k"][:] = inputs["k"][:, :1]
    return inputs, size


def both_errors(
    inputs: dict[str, Tensor], size: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors of the CUDA kernel and of the Triton form."""
    options = BOUNDED | {"cu_seqlens": torch.tensor([0, 101, 102, inputs["q"].shape[1]])}

    def gradients(op: object, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return run(op, inputs, size=size, **options)

    truth = gradients(recurrent_kda_reference, {n: x.double() for n, x in inputs.items()})
    mine = gradients(chunk_kda, inputs)
    with without_the_kernel(monkeypatch):
        other = gradients(chunk_kda, inputs)
    return errors_of(mine, truth, inputs), errors_of(other, truth, inputs)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, triton = both_errors(*case(**CASES[name]), monkeypatch)
    print(f"{name}: {as_text(mine)}; Triton: {as_text(triton)}", flush=True)
    sums = SUMS if "open gate" in name else 1e-2  # nothing is forgotten: the states' roundings are in every term alike
    limits = {"d_A_log": sums, "d_dt_bias": sums, "d_v": 1.5e-2, "d_beta": 1.5e-2}
    assert all(error <= limits.get(n, 1e-2) for n, error in mine.items()), as_text(mine)


def test_it_is_this_kernel_that_runs() -> None:
    x = make(1, 64, 1, 1)
    q, k, g, beta, v = (x[n].flatten(0, 1) for n in ("q", "k", "g", "beta", "v"))
    forms = {"gate": 1, "bounded": True, "l2": True, "sigmoid": True}
    assert backward.unsuitable(q, k, v, g, beta, x["A_log"], x["dt_bias"], v, **forms) is None


def test_values_taken_as_they_are() -> None:
    """No L2 norm, no sigmoid, neither A_log nor dt_bias; beta in float32."""
    inputs = make(1, 200, 2, 2)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["q"], inputs["k"] = (torch.nn.functional.normalize(inputs[n].float(), dim=-1).bfloat16() for n in "qk")
    inputs["beta"] = inputs["beta"].float().sigmoid()
    options = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    truth = run(recurrent_kda_reference, {n: x.double() for n, x in inputs.items()}, **options)
    mine = run(chunk_kda, inputs, **options)
    found = errors_of(mine, truth, inputs)
    print(as_text(found), flush=True)
    assert all(e <= (1.5e-2 if n == "d_beta" else 1e-2) for n, e in found.items()), as_text(found)


def test_repeatable_and_every_element_written() -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        inputs = make(1, 2000, 8, 8, sequences=3)
        options = BOUNDED | {"cu_seqlens": torch.tensor([0, 1, 1130, 2000])}
        results = [run(chunk_kda, inputs, **options) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in results[0].values())
    assert all(torch.equal(results[0][n], other[n]) for other in results[1:] for n in other)


def test_many_chunks_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of threads goes through several chunks of several heads: what one leaves must not reach the next."""
    inputs = make(2, 1024, 16, 32)
    mine = run(chunk_kda, inputs, **BOUNDED)
    with without_the_kernel(monkeypatch):
        other = run(chunk_kda, inputs, **BOUNDED)
    found = errors_of(mine, {n: x.double() for n, x in other.items()}, inputs)
    sums = ("d_A_log", "d_dt_bias")  # the Triton form's are less exact
    assert all(e <= (6e-2 if n in sums else 2e-2) for n, e in found.items()), as_text(found)
