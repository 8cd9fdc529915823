"""The CUDA kernels of chunk_kda as one differentiable operation, in the emulator, against the token loop in float64."""

from __future__ import annotations

import pytest
import torch
from kda_cases import relative_error
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.cuda import emulated
from perilune.ops.cuda.emulator import missing
from perilune.ops.kda import recurrent_kda_reference
from perilune.ops.kda.arguments import check
from perilune.ops.kda.gpu import autograd, forward
from perilune.ops.kda.gpu.forms import lay_out

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
OPTIONS = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0,
    "safe_gate": True, "output_final_state": True,
}  # fmt: skip
CHECKED = {"scale": None, "allow_neg_eigval": False, "state_v_first": False, "cu_seqlens": None}


@pytest.fixture(autouse=True)
def _uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "fastest", lambda *_: (10**6, 128))


def inputs(tokens: int, logit: float | None = None, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {name: normal(1, tokens, 2, 128).bfloat16() for name in ("q", "k", "v", "g")}
    made |= {"beta": normal(1, tokens, 2).bfloat16(), "A_log": normal(2) / 4, "dt_bias": normal(256) / 10}
    made["initial_state"] = normal(1, 2, 128, 128)
    if logit is not None:
        made["g"][:] = logit
    return made


def outcome(x: dict[str, Tensor], cotangent: Tensor, reference: bool = False) -> dict[str, Tensor]:
    """o, the final state and every gradient."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    with emulated():
        o, state = (
            recurrent_kda_reference(**leaves, **OPTIONS)
            if reference
            else autograd.kda_gpu(check(**leaves, **OPTIONS, **CHECKED))
        )
        found = torch.autograd.grad(o, list(leaves.values()), cotangent.to(o.dtype))
    return {"o": o.detach(), "state": state.detach()} | dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize(
    ("logit", "limits"),
    [
        (8.0, {"o": 3.3e-3, "v": 2.6e-3, "beta": 2.9e-3}),
        (None, {"o": 3.5e-3, "v": 2.6e-3, "beta": 3e-3}),
        (-12.0, {"o": 3.8e-3, "v": 3.8e-3}),
    ],
)
def test_how_exact_it_is(logit: float | None, limits: dict[str, float]) -> None:
    """A closed gate, a random one, an open one. Operands, U, states and E are rounded once to 2^-9; not dU, nor what P has of a
    row's own key before it is rounded."""
    errors: dict[str, float] = {}
    for seed in range(2):
        x = inputs(100, logit, seed)
        cotangent = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(9)).bfloat16()
        truth = outcome({n: t.double() for n, t in x.items()}, cotangent, reference=True)
        for name, t in outcome(x, cotangent).items():
            errors[name] = errors.get(name, 0.0) + float(relative_error(t, truth[name])) ** 2 / 2
    limits = {"A_log": 6e-2, "dt_bias": 6e-2} | limits
    assert all(e**0.5 <= limits.get(n, 6e-3) for n, e in errors.items()), {n: e**0.5 for n, e in errors.items()}


def test_a_cotangent_may_lie_anywhere() -> None:
    """The kernels of the backward pass copy 16 bytes at a time; what `prepare` wrote is for them alone."""
    x = inputs(70)
    wide = torch.randn(1, 70, 2, 133, generator=torch.Generator().manual_seed(1)).bfloat16()
    aligned = outcome(x, wide[..., 3:131].contiguous())
    shifted = outcome(x, wide[..., 3:131])
    assert all(torch.equal(aligned[name], shifted[name]) for name in aligned)


def test_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in three segments, with states that enter and leave, and one in one piece."""
    monkeypatch.setattr(forward, "fastest", lambda *_: (1, 128))
    x = inputs(170, -12.0)  # an open gate, so that much passes from one segment to the next
    generator = torch.Generator().manual_seed(2)
    x["initial_state"] = torch.randn(2, 2, 128, 128, generator=generator)
    cotangents = [torch.randn(*shape, generator=generator) for shape in (x["v"].shape, x["initial_state"].shape)]
    found = []
    for low in (True, False):
        leaves = {name: (t if low else t.double()).clone().requires_grad_() for name, t in x.items()}
        with emulated():
            if low:
                o, state = autograd.kda_gpu(check(**leaves, **OPTIONS | {"cu_seqlens": (0, 150, 170)}))
            else:
                o, state = recurrent_kda_reference(**leaves, **OPTIONS, cu_seqlens=torch.tensor([0, 150, 170]))
            assert state is not None
            given = [c.bfloat16().to(y.dtype) for c, y in zip(cotangents, (o, state), strict=True)]
            found.append([o.detach(), state.detach(), *torch.autograd.grad([o, state], list(leaves.values()), given)])
    limits = {"A_log": 1.5e-1, "dt_bias": 1.5e-1}
    for name, got, truth in zip(["o", "state", *x], *found, strict=True):
        assert float(relative_error(got, truth)) <= limits.get(name, 2e-2), name


def softplus_errors(x: dict[str, Tensor], *cotangents: Tensor) -> dict[str, float]:
    """Of o, the final state and every gradient, with Kimi-Linear's gate; cotangents of o, and of the state if there is a second."""
    options = {name: x for name, x in OPTIONS.items() if name not in ("lower_bound", "safe_gate")}
    found = []
    for dtype in (None, torch.float64):
        leaves = {n: t.clone().to(dtype or t.dtype).requires_grad_() for n, t in x.items()}
        with emulated():
            args = check(**leaves, **options, **CHECKED)
            assert dtype or lay_out(args, True) is not None
            results = recurrent_kda_reference(**leaves, **options) if dtype else autograd.kda_gpu(args)
            given = [c.to(y.dtype) for c, y in zip(cotangents, results)]
            gradients = torch.autograd.grad(results[: len(given)], list(leaves.values()), given)
        found.append([*(y.detach() for y in results), *gradients])
    named = zip(["o", "state", *x], *found, strict=True)
    return {name: float(relative_error(got, truth)) for name, got, truth in named}


@pytest.mark.parametrize("logit", [-3.0, 3.0, None])
def test_the_softplus_gate(logit: float | None) -> None:
    """Both passes, one form of CUDA kernels."""
    x = inputs(150, logit)
    errors = softplus_errors(x, torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(9)).bfloat16())
    limits = {"o": 4.3e-3, "state": 4.3e-3, "beta": 1.5e-2, "g": 1.5e-2, "A_log": 1e-1, "dt_bias": 1e-1}
    assert all(error < limits.get(name, 8e-3) for name, error in errors.items()), errors


def many(sequences: int, tokens: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs of some sequences of two heads, and cotangents of their outputs and last states."""
    generator = torch.Generator().manual_seed(seed)
    x = {
        name: torch.cat([inputs(tokens, seed=n)[name] for n in range(sequences)])
        for name in ("q", "k", "v", "g", "beta")
    }
    x |= {name: t for name, t in inputs(tokens).items() if name in ("A_log", "dt_bias")}
    x["initial_state"] = torch.randn(sequences, 2, 128, 128, generator=generator)
    cotangents = (torch.randn(y.shape, generator=generator).bfloat16() for y in (x["v"], x["initial_state"]))
    return x, *cotangents


@pytest.mark.parametrize("tokens", [128, 100])
def test_what_cancels_is_not_added(tokens: int) -> None:
    """Almost everything is forgotten at each step, and the last state has a cotangent: what the last token writes is all of it, and no
    decay's gradient has any of that."""
    x, *cotangents = many(2, tokens, 1)
    x["g"][:] = 12.0
    errors = softplus_errors(x, *cotangents)
    assert errors["g"] < 3.5e-3, errors  # 7e-2 with it, of 128 tokens
    assert errors["dt_bias"] < 6e-3, errors  # 6e-1 and, of 100 tokens, 1.3e-2 with it


def test_one_key_again_and_again() -> None:
    """Nothing is forgotten and each token overwrites the one before, so that outputs are differences of what was written."""
    x, *cotangents = many(8, 128, 2)
    x["g"][:], x["beta"][:] = -12.0, 8.0
    x["k"][:] = x["k"][:, :1].clone()
    errors = softplus_errors(x, *cotangents)
    # In brackets with L as the product of rounded keys.
    limits = {"o": 3.6e-3, "state": 3.3e-3, "q": 3.4e-3, "k": 4.9e-3, "v": 3.6e-2}
    assert all(errors[name] < limit for name, limit in limits.items()), errors
