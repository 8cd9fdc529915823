"""The Triton kernels of chunk_kda on a GPU, against the float64 token loop: accuracy, every launch setting, the traps.

They run where the CUDA kernels do not; beside fla-core: test_kda_peer_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, recurrent_kda_reference, select
from perilune.ops.kda.cuda import backward as cuda_backward
from perilune.ops.kda.cuda import prepare as cuda_prepare
from perilune.ops.kda.cuda import scan as cuda_scan
from perilune.ops.kda.cuda import scan_backward as cuda_scan_backward
from perilune.ops.kda.gpu import forward, known

IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
BOUNDED = IN_KERNEL | {"lower_bound": -5.0, "safe_gate": True}
LOW = ("q", "k", "v", "g", "beta")
# A_log and dt_bias get sums over all rows, to which a chunk's rounded states give all its rows the same error: fla-core's are
# off by up to 0.2 of what adds up where nothing is forgotten.
SUMS = 1.5e-1
LIMITS = {"o": 4.3e-3, "d_g": 2e-2, "d_beta": 1.5e-2, "d_A_log": SUMS, "d_dt_bias": SUMS}  # every other gradient: 6e-3


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for stage in (cuda_prepare, cuda_scan, cuda_scan_backward, cuda_backward):
        monkeypatch.setattr(stage, "unsuitable", lambda *args, **kwargs: "Triton is tested here")
    known.forget()
    with force("triton"):
        yield
    known.forget()


def make(
    batch: int,
    length: int,
    qk_heads: int,
    heads: int,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    sequences: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    v_first: bool = False,
) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    inner = (value_dim, key_dim) if v_first else (key_dim, value_dim)
    inputs = {
        "q": normal(batch, length, qk_heads, key_dim),
        "k": normal(batch, length, qk_heads, key_dim),
        "v": normal(batch, length, heads, value_dim),
        "g": normal(batch, length, heads, key_dim) - 1,
        "beta": normal(batch, length, heads),
        "A_log": 0.3 * normal(heads),
        "dt_bias": normal(heads * key_dim),
        "initial_state": normal(sequences or batch, heads, *inner),
    }
    return {n: x.to(dtype) if n in LOW else x for n, x in inputs.items()}


def run(op: Any, inputs: dict[str, Tensor], *, size: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """o, the final state, and every gradient under fixed cotangents of about this size."""
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    o, state = op(**leaves, output_final_state=True, **options)
    generator = torch.Generator(device="cuda").manual_seed(7)
    cotangents = [
        (size * torch.randn(x.shape, device="cuda", generator=generator)).bfloat16().to(x.dtype) for x in (o, state)
    ]
    gradients = torch.autograd.grad([o, state], list(leaves.values()), cotangents)
    return {"o": o.detach(), "state": state.detach()} | {f"d_{n}": x for n, x in zip(leaves, gradients, strict=True)}


def relative_error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm().clamp_min(1e-30))


def errors_of(
    got: dict[str, Tensor], truth: dict[str, Tensor], inputs: dict[str, Tensor], bounded: bool = True
) -> dict[str, float]:
    """Relative errors; those of A_log and dt_bias relative to what adds up to them, which may cancel to almost nothing."""
    errors = {n: relative_error(got[n], truth[n]) for n in truth}
    if "d_dt_bias" in truth:
        d_logit, logit = truth["d_g"], inputs["g"].double() + inputs["dt_bias"].double().view(*inputs["g"].shape[2:])
        slope = logit if bounded else torch.nn.functional.softplus(logit) / logit.sigmoid()
        parts = {"d_dt_bias": d_logit, "d_A_log": d_logit * slope}
        for name, part in parts.items():
            errors[name] = float((got[name].double() - truth[name]).norm() / part.norm().clamp_min(1e-30))
    return errors


def as_text(errors: dict[str, float]) -> str:
    """Pytest cuts a dictionary short."""
    return " ".join(f"{n} {e:.1e}" for n, e in errors.items())


def check(inputs: dict[str, Tensor], limits: dict[str, float] | None = None, **options: Any) -> None:
    truth = run(recurrent_kda_reference, {n: x.double() for n, x in inputs.items()}, **options)
    errors = errors_of(run(chunk_kda, inputs, **options), truth, inputs, "lower_bound" in options)
    limits = LIMITS if limits is None else limits
    assert all(error <= limits.get(n, 6e-3) for n, error in errors.items()), as_text(errors)


def test_it_is_these_kernels_that_run() -> None:
    with force("triton"):
        assert select("cuda", torch.bfloat16).implementation == "triton"


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize("bounded", [True, False])
def test_gradients(key_dim: int, value_dim: int, bounded: bool) -> None:
    check(make(2, 263, 2, 2, key_dim, value_dim), **(BOUNDED if bounded else IN_KERNEL))


@pytest.mark.parametrize("size", [1e-9, 1e9])
@pytest.mark.parametrize("logit", [-15.0, 8.0])
def test_gradients_of_any_size_keep_their_precision(size: float, logit: float) -> None:
    inputs = make(1, 128, 1, 1)
    inputs["g"][:] = logit
    truth = run(recurrent_kda_reference, {n: x.double() for n, x in inputs.items()}, size=size, **BOUNDED)
    errors = errors_of(run(chunk_kda, inputs, size=size, **BOUNDED), truth, inputs)
    assert all(error <= LIMITS.get(n, 6e-3) for n, error in errors.items()), as_text(errors)


def test_gradients_with_two_value_heads_a_key_head() -> None:
    check(make(1, 200, 2, 4, v_first=True), **BOUNDED, state_v_first=True)


def test_gradients_in_float16() -> None:
    check(make(1, 200, 2, 2, dtype=torch.float16), **BOUNDED)


def test_gradients_of_packed_sequences() -> None:
    check(make(1, 500, 2, 2, sequences=4), **BOUNDED, cu_seqlens=torch.tensor([0, 100, 100, 229, 500]))


def test_gradients_across_segments() -> None:
    inputs = make(1, 4500, 1, 1)
    args = forward.Setting(128**-0.5, True, 1, -5.0, True, True, 1.0, False, True, True, (0, 4500))
    assert forward.planned(args, 1, 128, 128, torch.device("cuda"), False).split
    check(inputs, **BOUNDED)


@pytest.mark.parametrize("scale", [1.0, 128**-0.5])
def test_t05_scales_and_values_taken_as_they_are(scale: float) -> None:
    inputs = make(1, 200, 2, 2)
    del inputs["A_log"], inputs["dt_bias"]
    inputs["g"] = -5 * torch.sigmoid(inputs["g"].float())
    inputs["k"] = torch.nn.functional.normalize(inputs["k"].float(), dim=-1).bfloat16()
    inputs["beta"] = inputs["beta"].sigmoid()
    inputs["beta"][:, ::7] = 0
    check(inputs, safe_gate=True, scale=scale)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("segment", [2, 1000])
def test_t05_every_width_with_and_without_segments(width: int, segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `fastest` chooses between; every other setting is fixed."""
    monkeypatch.setattr(forward, "fastest", lambda *_: (segment, width))
    known.forget()
    inputs = make(1, 1100, 1, 1)
    inputs["g"] -= 8  # or nothing would pass from one segment to the next
    check(inputs, LIMITS | {"o": 6e-3}, **BOUNDED)


def test_t01_later_tokens_do_not_move_earlier_ones() -> None:
    first = make(1, 256, 2, 2)
    second = {n: x.clone() for n, x in first.items()}
    for name in LOW:
        second[name][:, 200:] = torch.randn_like(second[name][:, 200:])
    results = []
    for inputs in (first, second):
        leaves = {n: x.requires_grad_() for n, x in inputs.items()}
        o, _ = chunk_kda(**leaves, **BOUNDED)
        gradients = torch.autograd.grad(o[:, :200].float().sum(), [leaves[n] for n in LOW])
        results.append([o[:, :200], *(x[:, :200] for x in gradients)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_t02_one_key_repeated_for_long() -> None:
    inputs = make(1, 16_384, 1, 1)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["g"][:], inputs["beta"][:] = -12.0, 8.0
    options = BOUNDED | {"output_final_state": True}
    with torch.no_grad():
        truth, state = recurrent_kda_reference(**{n: x.double() for n, x in inputs.items()}, **options)
        o, final = chunk_kda(**inputs, **options)
    # nothing is forgotten: bfloat16 operands round 256 times on the way
    assert relative_error(o, truth) < 2e-2 and relative_error(final, state) < 2e-2
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    gradients = torch.autograd.grad(chunk_kda(**leaves, **options)[0].float().sum(), list(leaves.values()))
    assert all(torch.isfinite(g).all() for g in gradients)


def test_t50_states_beyond_the_range_of_float16() -> None:
    inputs = make(1, 256, 1, 1)
    inputs["v"] *= 1e5
    inputs["g"] -= 12.0
    inputs["initial_state"] *= 1e5
    check(inputs, LIMITS, **BOUNDED)


def test_repeatable_and_every_element_written() -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        inputs = make(1, 500, 2, 4, sequences=3)
        options = BOUNDED | {"cu_seqlens": torch.tensor([0, 1, 130, 500])}
        first, second = run(chunk_kda, inputs, **options), run(chunk_kda, inputs, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in first.values())
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("poisoned", LOW)
@pytest.mark.parametrize("bounded", [True, False])
def test_nan_reaches_the_outputs_and_stays_in_its_sequence(poisoned: str, bounded: bool) -> None:
    """The interpreter's maximum keeps a NaN either way; a GPU's only where it is told to."""
    inputs = make(1, 200, 2, 2, sequences=2)
    inputs[poisoned][:, 5] = float("nan")
    options = (BOUNDED if bounded else IN_KERNEL) | {
        "cu_seqlens": torch.tensor([0, 70, 200]),
        "output_final_state": True,
    }
    with torch.no_grad():
        o, state = chunk_kda(**inputs, **options)
    assert torch.isnan(o[:, 5]).all(), "hidden"
    assert torch.isfinite(o[:, 70:]).all() and torch.isfinite(state[1]).all(), "reached the other sequence"
    assert poisoned == "q" or torch.isnan(state[0]).any(), "lost on the way to the state"


def test_strided_inputs_between_nan() -> None:
    inputs = make(1, 300, 2, 2)
    packed = torch.full((1, 300, 2, 640), float("nan"), device="cuda", dtype=torch.bfloat16)
    views = {n: packed[..., 64 + 192 * i : 192 + 192 * i] for i, n in enumerate(("q", "k", "v"))}
    for name, view in views.items():
        view.copy_(inputs[name])
    with torch.no_grad():
        assert torch.equal(chunk_kda(**inputs, **BOUNDED)[0], chunk_kda(**inputs | views, **BOUNDED)[0])


def test_t49_offsets_beyond_32_bits() -> None:
    """2^31 numbers in q alone; the last rows equal those of a short run that starts from the state before them."""
    length, heads = 262_144, 65
    with torch.no_grad():
        x = torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16)
        inputs = {"q": x, "k": x.roll(1, 1), "v": x.roll(2, 1), "g": x, "beta": x[..., 0]}
        inputs |= {"A_log": torch.zeros(heads, device="cuda"), "dt_bias": torch.zeros(heads * 128, device="cuda")}
        o, _ = chunk_kda(**inputs, **BOUNDED)
        tail = {n: t[:, -4096:].contiguous() if n in LOW else t for n, t in inputs.items()}
        short, _ = chunk_kda(**tail, **BOUNDED)
        # decays of a half-life of one token: 2048 tokens on nothing of the state before is left
        assert relative_error(short[:, -1024:], o[:, -1024:].double()) < 5e-3
        assert torch.isfinite(o).all()
