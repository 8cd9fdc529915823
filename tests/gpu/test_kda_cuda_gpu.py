"""chunk_kda on a GPU with the stages that are CUDA kernels, in bfloat16, against the float64 token loop.

The stages alone: tests/ops/kda/test_kda_cuda.py, which runs on the GPU too. Limits as in test_kda_chunk_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_kda_chunk_gpu import BOUNDED, IN_KERNEL, LIMITS, LOW, as_text, errors_of, make, relative_error, run
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.cuda import Launch
from perilune.ops.kda import chunk_kda, recurrent_kda_reference
from perilune.ops.kda.gpu import forward, known


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Every call takes the CUDA kernels; a test that fell back to Triton would show nothing."""
    seen: set[str] = set()
    runs = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *args: (seen.add(self.kernel.entry), runs(self, *args))[1])
    known.forget()
    with force("triton"):
        yield seen
    known.forget()
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


@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize("key_dim", [64, 128])
def test_softplus_gate(key_dim: int, value_dim: int) -> None:
    check(make(2, 263, 2, 2, key_dim, value_dim), **IN_KERNEL)
    check(make(1, 512, 2, 4, key_dim, value_dim), **IN_KERNEL)


@pytest.mark.parametrize("logit", [-9.0, 3.0, 40.0])
def test_softplus_gate_at_its_ends(logit: float) -> None:
    inputs = make(1, 300, 2, 2)
    inputs["g"][:], inputs["g"][:, 30::40] = logit, 100.0
    check(inputs, 6e-3, **IN_KERNEL)


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("logit", [None, -6.0, 8.0])
def test_gradients_of_the_softplus_gate(logit: float | None, key_dim: int, _cuda: set[str]) -> None:
    inputs = make(1, 300, 2, 4, key_dim)
    if logit is not None:
        inputs["g"][:] = logit
    first = run(chunk_kda, inputs, **IN_KERNEL)
    truth = run(recurrent_kda_reference, {n: x.double() for n, x in inputs.items()}, **IN_KERNEL)
    errors = errors_of(first, truth, inputs, False)
    limits = LIMITS | {"o": 6e-3}  # as at the gate's ends
    assert all(error <= limits.get(n, 6e-3) for n, error in errors.items()), as_text(errors)
    assert {"scan_backward", "backward"} <= _cuda
    again = run(chunk_kda, inputs, **IN_KERNEL)
    assert all(torch.equal(first[n], again[n]) for n in first)


def test_value_heads_and_packed_sequences() -> None:
    check(make(1, 500, 2, 4, sequences=4), **BOUNDED, cu_seqlens=torch.tensor([0, 100, 100, 229, 500]))


@pytest.mark.parametrize("width", [64, 128])
def test_across_segments(width: int, _cuda: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "fastest", lambda *_: (10, width))  # before a first call: see `_cuda`
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


def test_a_form_found_again_waits_for_nothing() -> None:
    """Other addresses, forms in turn, boundaries on the device, another stream: the bits of a first call, and no
    synchronisation."""
    bounds = torch.tensor([0, 100, 100, 229, 500], device="cuda")
    cases = [
        (make(1, 500, 2, 4, sequences=4), {"cu_seqlens": bounds}),
        (make(2, 250, 2, 2), {}),
        (make(1, 4500, 1, 1), {}),
    ]
    cases = [(inputs, BOUNDED | options) for inputs, options in cases]
    first = [run(chunk_kda, inputs, **options) for inputs, options in cases]
    others = [({n: x.clone() for n, x in inputs.items()}, options) for inputs, options in cases]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                found = [chunk_kda(**inputs, **options, output_final_state=True) for inputs, options in others]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    for (o, state), truth in zip(found, first, strict=True):
        assert torch.equal(o, truth["o"]) and torch.equal(state, truth["state"])
    again = [run(chunk_kda, inputs, **options) for inputs, options in others]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(first, again, strict=True) for n in a)


def test_boundaries_that_are_written_anew_are_read_anew() -> None:
    inputs = make(1, 500, 2, 2)
    del inputs["initial_state"]
    bounds = torch.tensor([0, 100, 500], device="cuda")
    with torch.no_grad():
        before = chunk_kda(**inputs, **BOUNDED, cu_seqlens=bounds)[0]
        bounds[1] = 300
        after = chunk_kda(**inputs, **BOUNDED, cu_seqlens=bounds)[0]
        assert torch.equal(after, chunk_kda(**inputs, **BOUNDED, cu_seqlens_cpu=[0, 300, 500])[0])
    assert not torch.equal(before, after)


def test_a_new_plan_on_one_stream_is_whole_on_another() -> None:
    """Its tables are copied without waiting; a call on another stream that follows at once finds them."""
    inputs = make(1, 3000, 2, 2)
    del inputs["initial_state"]
    busy, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    with torch.no_grad():
        for n in range(1, 6):
            cuts = (0, 17 * n, 1000 + n, 3000)
            torch.cuda.synchronize()
            for _ in range(10):
                busy = busy @ busy * 1e-4
            one = chunk_kda(**inputs, **BOUNDED, cu_seqlens_cpu=cuts)[0]  # behind work that takes long
            with torch.cuda.stream(side):
                two = chunk_kda(**inputs, **BOUNDED, cu_seqlens_cpu=cuts)[0]
            torch.cuda.synchronize()
            assert torch.equal(one, two), cuts
