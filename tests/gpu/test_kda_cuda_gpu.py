"""chunk_kda on a GPU with the stages that are CUDA kernels, in bfloat16, against the float64 token loop.

The stages alone: tests/ops/kda/test_kda_cuda.py, which runs on the GPU too. Limits as in test_kda_chunk_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_kda_chunk_gpu import BOUNDED, LIMITS, LOW, as_text, errors_of, make, relative_error, run
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.cuda import Kernel
from perilune.ops.kda import chunk_kda, recurrent_kda_reference
from perilune.ops.kda.gpu import forward


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Every call takes the CUDA kernels; a test that fell back to Triton would show nothing."""
    seen: set[str] = set()
    runs = Kernel.launch
    monkeypatch.setattr(Kernel, "launch", lambda self, *args: (seen.add(self.entry), runs(self, *args))[1])
    with force("triton"):
        yield seen
    assert {"prepare", "scan"} <= seen, "the CUDA kernels did not run"


def check(inputs: dict[str, Tensor], limit: float = 4.3e-3, **options: object) -> None:
    """o and the final state; gradients have tests of their own."""
    options |= {"output_final_state": True}
    with torch.no_grad():
        truth = recurrent_kda_reference(**{n: x.double() for n, x in inputs.items()}, **options)
        got = chunk_kda(**inputs, **options)
    errors = [relative_error(x, y) for x, y in zip(got, truth, strict=True)]
    assert all(error <= limit for error in errors), errors


@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize("key_dim", [64, 128])
def test_whole_operation(key_dim: int, value_dim: int) -> None:
    check(make(2, 263, 2, 2, key_dim, value_dim), **BOUNDED)


def test_value_heads_and_packed_sequences() -> None:
    check(make(1, 500, 2, 4, sequences=4), **BOUNDED, cu_seqlens=torch.tensor([0, 100, 100, 229, 500]))


@pytest.mark.parametrize("width", [64, 128])
def test_across_segments(width: int, _cuda: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "fastest", lambda *_: (10, width))
    check(make(1, 4500, 1, 1), **BOUNDED)
    assert "summary" in _cuda


@pytest.mark.parametrize("logit", [-40.0, -9.0, 40.0])
def test_gates_at_their_ends(logit: float) -> None:
    inputs = make(1, 300, 2, 2)
    inputs["g"][:] = logit
    check(inputs, 6e-3, **BOUNDED)


def test_t05_natural_decays_and_unit_scale() -> None:
    inputs = make(1, 200, 2, 2)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["g"] = -5 * torch.sigmoid(inputs["g"].float())
    inputs["k"] = torch.nn.functional.normalize(inputs["k"].float(), dim=-1).bfloat16()
    inputs["beta"] = inputs["beta"].float().sigmoid()
    inputs["beta"][:, ::7] = 0
    check(inputs, 5e-3, safe_gate=True, scale=1.0)


def test_t02_one_key_repeated_for_long() -> None:
    inputs = make(1, 16_384, 1, 1)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["g"][:], inputs["beta"][:] = -12.0, 8.0
    check(inputs, 2e-2, **BOUNDED)


def test_the_same_bits_every_time() -> None:
    inputs = make(1, 4096, 4, 8)
    with torch.no_grad():
        first = chunk_kda(**inputs, **BOUNDED)[0]
        assert all(torch.equal(first, chunk_kda(**inputs, **BOUNDED)[0]) for _ in range(20))


def test_t01_later_tokens_do_not_move_earlier_ones() -> None:
    first = make(1, 256, 2, 2)
    second = {n: x.clone() for n, x in first.items()}
    for name in LOW:
        second[name][:, 200:] = torch.randn_like(second[name][:, 200:])
    with torch.no_grad():
        a, b = (chunk_kda(**x, **BOUNDED)[0][:, :200] for x in (first, second))
    assert torch.equal(a, b)


def test_a_stream_and_a_graph() -> None:
    """The launch joins torch's current stream, and a captured graph replays it on new inputs."""
    inputs = make(1, 300, 2, 2)
    with torch.no_grad():
        expected = chunk_kda(**inputs, **BOUNDED)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = chunk_kda(**inputs, **BOUNDED)[0]
        for x in inputs.values():
            x.mul_(0.5)
        graph.replay()
        halved = o.clone()
        assert torch.equal(halved, chunk_kda(**inputs, **BOUNDED)[0]) and not torch.equal(halved, expected)


@pytest.mark.parametrize("segment", [2, 1000])
def test_gradients(segment: int, _cuda: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, and the same bits again."""
    monkeypatch.setattr(forward, "fastest", lambda *_: (segment, 128))
    inputs = make(1, 700, 2, 4)
    first, second = run(chunk_kda, inputs, **BOUNDED), run(chunk_kda, inputs, **BOUNDED)
    assert all(torch.equal(first[n], second[n]) for n in first)
    truth = run(recurrent_kda_reference, {n: x.double() for n, x in inputs.items()}, **BOUNDED)
    errors = errors_of(first, truth, inputs)
    assert all(error <= LIMITS.get(n, 6e-3) for n, error in errors.items()), as_text(errors)
    assert {"scan_backward", "backward"} <= _cuda
