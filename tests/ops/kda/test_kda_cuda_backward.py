"""The backward pass's CUDA kernel in the emulator, against float64 autograd through the token loop.

Chunks are given to the oracle as sequences of their own, with the kept states as entry states and the cotangents that the
serial pass would leave as those of the final states. Each case runs with the warps in both orders: a missing barrier shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from kda_cases import relative_error
from torch import Tensor
from torch.nn.functional import normalize, softplus

from perilune.ops.cuda import emulated
from perilune.ops.cuda.emulator import missing
from perilune.ops.kda import recurrent_kda_reference
from perilune.ops.kda.cuda import backward
from perilune.ops.kda.gpu.plan import CHUNK

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@dataclass
class Case:
    """Chunks of these lengths; logits, keys and write strengths random unless said otherwise."""

    lengths: tuple[int, ...] = (64, 37)
    qk_heads: int = 1
    heads: int = 1
    key_dim: int = 64
    value_dim: int = 64
    logit: float | None = None
    spread: float = 1.0
    one_key: bool = False
    beta: float | None = None
    size: float = 1.0  # of the cotangents
    raw: bool = True  # q, k before the norm, beta before the sigmoid; A_log and dt_bias given; else beta is float32
    scale: float = 0.1
    bounded: bool = True  # the bounded gate, else softplus
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tokens, N = sum(self.lengths), len(self.lengths)
        q, k = normal(1, tokens, self.qk_heads, self.key_dim), normal(1, tokens, self.qk_heads, self.key_dim)
        g = self.spread * (normal(1, tokens, self.heads, self.key_dim) - 1)
        beta = normal(1, tokens, self.heads)
        if self.one_key:
            k = k[:, :1] + 0 * k
        if self.logit is not None:
            g = g * 0 + self.logit
        if self.beta is not None:
            beta = beta * 0 + self.beta
        if not self.raw:
            q, k, beta = normalize(q, dim=-1), normalize(k, dim=-1), beta.sigmoid()
        v = normal(1, tokens, self.heads, self.value_dim)
        state = normal(N, self.heads, self.value_dim, self.key_dim)
        self.inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
        self.inputs = {name: x if name == "beta" and not self.raw else x.bfloat16() for name, x in self.inputs.items()}
        if self.raw:
            self.inputs |= {"A_log": 0.3 * normal(self.heads), "dt_bias": normal(self.heads * self.key_dim)}
        self.do = (self.size * normal(*v.shape)).bfloat16()
        self.dS = (self.size * normal(*state.shape)).bfloat16()

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def truth(self) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients in float64, and what each token writes, `[chunks, heads, 64, V]`."""
        leaves = {n: x.double().requires_grad_() for n, x in self.inputs.items()}
        options = {
            "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": self.raw, "use_beta_sigmoid_in_kernel": self.raw,
            "lower_bound": -5.0 if self.bounded else None, "safe_gate": self.bounded, "state_v_first": True, "output_final_state": True, "scale": self.scale,
        }  # fmt: skip
        o, final = recurrent_kda_reference(**leaves, **options, cu_seqlens=torch.tensor(self.starts))
        gradients = torch.autograd.grad([o, final], list(leaves.values()), [self.do.double(), self.dS.double()])
        with torch.no_grad():
            writes = self._writes({n: x.detach() for n, x in leaves.items()})
        return dict(zip(leaves, gradients, strict=True)), writes

    def _writes(self, x: dict[str, Tensor]) -> Tensor:
        k, beta = x["k"][0], x["beta"][0]
        logit, rate = x["g"][0], torch.ones(self.heads, dtype=torch.float64)
        if self.raw:
            k, beta = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), beta.sigmoid()
            logit, rate = logit + x["dt_bias"].view(self.heads, -1), x["A_log"].exp()
        gate = -5 * torch.sigmoid(rate[:, None] * logit) if self.bounded else -rate[:, None] * softplus(logit)
        decay = gate.exp()
        k = k.repeat_interleave(self.heads // self.qk_heads, dim=1)
        U = torch.zeros(len(self.lengths), self.heads, CHUNK, self.value_dim, dtype=torch.float64)
        for n, start in enumerate(self.starts[:-1]):
            state = x["initial_state"][n]
            for i in range(self.lengths[n]):
                t = start + i
                state = state * decay[t, :, None, :]
                U[n, :, i] = beta[t, :, None] * (x["v"][0, t] - (state @ k[t, :, :, None])[..., 0])
                state = state + U[n, :, i, :, None] * k[t, :, None, :]
        return U

    def run(self, U: Tensor, E: Tensor, *, backwards: bool, aligned: bool = True) -> dict[str, Tensor]:
        """Through the kernel; outputs start as NaN."""
        x = {n: t[0] if t.dim() in (3, 4) and n != "initial_state" else t for n, t in self.inputs.items()}
        tokens, N = sum(self.lengths), len(self.lengths)
        wide = torch.float32 if self.heads != self.qk_heads else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full(shape, float("nan"), dtype=dtype)

        dq, dk = (empty(tokens, self.heads, self.key_dim, dtype=wide) for _ in "qk")
        dz, dbeta = empty(tokens, self.heads, self.key_dim), empty(tokens, self.heads, dtype=x["beta"].dtype)
        dA, bias = (
            empty(N, self.heads, *inner, dtype=torch.float32) if self.raw else None for inner in ((), (self.key_dim,))
        )
        chunks = torch.tensor(list(zip(self.starts, self.lengths)), dtype=torch.int32)
        inputs = x["q"], x["k"], x["v"], x["g"], x["beta"], x.get("A_log"), x.get("dt_bias"), self.do[0]
        forms = {"l2": self.raw, "sigmoid": self.raw}
        with emulated(backwards):
            gate = 1 if self.bounded else 2
            assert backward.unsuitable(*inputs, gate=gate, bounded=self.bounded, **forms) is None
            backward.launch(
                *inputs, U.bfloat16(), x["initial_state"], E.bfloat16(), self.dS, chunks, dq, dk, dz, dbeta, dA, bias,
                scale=self.scale, lower_bound=-5.0, beta_scale=1.0, bounded=self.bounded, **forms,
            )  # fmt: skip
        found = {"q": dq, "k": dk, "g": dz, "beta": dbeta, "A_log": dA, "dt_bias": bias}
        return {n: t for n, t in found.items() if t is not None}

    def errors(self) -> dict[str, float]:
        """Relative errors; those of A_log and dt_bias relative to what adds up to them, which may cancel."""
        truth, U = self.truth()
        got = self.run(U, truth["v"][0], backwards=False)
        again = self.run(U, truth["v"][0], backwards=True)
        assert all(torch.equal(got[n], again[n]) for n in got), "depends on the order of the warps"
        for n in "qk":
            got[n] = got[n].float().unflatten(1, (self.qk_heads, -1)).sum(2)
        errors = {n: relative_error(got[n], truth[n][0]) for n in ("q", "k", "g", "beta")}
        if self.raw:
            logit = self.inputs["g"].double() + self.inputs["dt_bias"].double().view(self.heads, -1)
            along = logit if self.bounded else softplus(logit) / logit.sigmoid()
            parts = {"A_log": truth["g"] * along, "dt_bias": truth["g"]}
            for n, part in parts.items():
                error = got[n].double().sum(0).flatten() - truth[n].flatten()
                errors[n] = float(error.norm() / part.norm())
        return errors


CASES = {
    "plain": Case(),
    "ragged chunks": Case(lengths=(1, 15, 17, 64)),
    "K and V of 128, two value heads a key head": Case((64, 50), qk_heads=1, heads=2, key_dim=128, value_dim=128),
    "K of 128": Case((64,), key_dim=128),
    "V of 128": Case((64,), value_dim=128),
    "closed gate": Case(logit=8.0),
    "open gate": Case(logit=-15.0),
    "logits far apart": Case(spread=8.0),
    "one key, open gate, strong writes": Case(logit=-15.0, one_key=True, beta=6.0),
    "weak writes": Case(beta=-20.0),
    "values taken as they are": Case((64, 9), raw=False),
    "softplus": Case(bounded=False),
    "softplus, ragged chunks": Case(lengths=(1, 15, 17, 64), bounded=False),
    "softplus, K and V of 128, two value heads a key head": Case(
        (64, 50), heads=2, key_dim=128, value_dim=128, bounded=False
    ),
    "softplus, closed gate": Case(logit=8.0, bounded=False),
    "softplus, open gate": Case(logit=-9.0, bounded=False),
    "softplus, logits far apart": Case(spread=8.0, bounded=False),
    "softplus, one key, open gate, strong writes": Case(logit=-9.0, one_key=True, beta=6.0, bounded=False),
}


# U, E and the states come rounded to bfloat16: what these roundings do to a chunk's last rows is in every sum over rows
LIMITS = {"beta": 2e-2, "A_log": 3e-2, "dt_bias": 3e-2}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    errors = CASES[name].errors()
    assert all(error < LIMITS.get(n, 9e-3) for n, error in errors.items()), errors


@pytest.mark.parametrize("bounded", [True, False])
def test_a_pair_of_rows_counts_the_same_on_either_side(bounded: bool) -> None:
    """Else the difference is in the decay's gradient at every earlier row, and sums over rows show it."""
    errors = Case(lengths=(64,) * 4, bounded=bounded).errors()
    limits = {"A_log": 2e-3, "dt_bias": 5e-3, "g": 3.2e-3} if bounded else {"A_log": 9e-3, "dt_bias": 7e-3, "g": 2.9e-3}
    assert all(errors[name] < limit for name, limit in limits.items()), errors


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("logit", [-15.0, 8.0])
def test_gradients_of_any_size_keep_their_precision(logit: float, bounded: bool) -> None:
    """A loss averaged over a million tokens has cotangents of 1e-9; with a gate that stays open these meet every factor."""
    sizes = 2.0**-50, 1.0, 2.0**50
    found = []
    for size in sizes:
        case = Case(logit=logit, size=size, bounded=bounded)
        truth, U = case.truth()
        found.append(case.run(U, truth["v"][0], backwards=False))
    for size, other in zip(sizes, found):
        for name, x in other.items():
            assert relative_error(x.double() / size, found[1][name].double()) < 1e-5, (size, name)


@pytest.mark.parametrize("bounded", [True, False])
def test_t01_later_tokens_do_not_move_earlier_ones(bounded: bool) -> None:
    """Neither by their inputs nor by the cotangents that they do not have."""
    case = Case((64,), bounded=bounded)
    case.do[:, 21:] = 0
    case.dS[:] = 0
    truth, U = case.truth()
    E = truth["v"][0].clone()
    E[21:] = 0
    first = case.run(U, E, backwards=False)
    for name in ("q", "k", "g", "beta"):
        case.inputs[name][:, 21:] = torch.randn_like(case.inputs[name][:, 21:])
    U[:, :, 21:] = torch.randn_like(U[:, :, 21:])
    second = case.run(U, E, backwards=False)
    assert all(torch.equal(first[n][:21], second[n][:21]) for n in ("q", "k", "g", "beta"))


@pytest.mark.parametrize("bounded", [True, False])
def test_nan_stays_in_its_chunk_and_head(bounded: bool) -> None:
    case = Case((64, 64), heads=2, qk_heads=2, bounded=bounded)
    truth, U = case.truth()
    case.inputs["g"][:, 70, 1] = float("nan")
    got = case.run(U, truth["v"][0], backwards=False)
    assert torch.isnan(got["g"][64:, 1]).any() and torch.isnan(got["k"][64:, 1]).any()
    assert all(torch.isfinite(got[n][:64]).all() and torch.isfinite(got[n][64:, 0]).all() for n in "qkg")


def test_the_reason_names_what_does_not_fit() -> None:
    case = Case()
    x = {n: t[0] for n, t in case.inputs.items()}
    forms = {"gate": 1, "bounded": True, "l2": True, "sigmoid": True}

    def reason(**changes: object) -> str:
        given = {
            "q": x["q"],
            "k": x["k"],
            "v": x["v"],
            "g": x["g"],
            "beta": x["beta"],
            "A_log": None,
            "dt_bias": None,
            "do": case.do[0],
        }
        with emulated():
            return backward.unsuitable(**(given | forms | changes)) or ""

    assert reason() == ""
    assert reason(gate=2, bounded=False) == ""
    assert "computed in it" in reason(gate=0, bounded=False) and "computed in it" in reason(gate=0)
    assert "float16" in reason(k=x["k"].half())
    assert "not 32" in reason(q=x["q"][..., :32])
    assert "rows of g" in reason(g=torch.zeros(101, 1, 67, dtype=torch.bfloat16)[..., :64])
    assert "cpu" in (
        backward.unsuitable(x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, case.do[0], **forms) or ""
    )
