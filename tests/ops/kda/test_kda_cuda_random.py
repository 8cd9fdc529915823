"""Calls of the CUDA kernels of chunk_kda drawn at random, emulated between forbidden pages, against the token loop in float64.

A call draws sizes, sequences, cuts, tables with room, layouts, gates at their ends, keys that repeat or vanish, values of any size. It
is made in both orders of warps, and with and without a form: not a bit may differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from guarded_memory import GuardedMemory
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.cuda import emulated
from perilune.ops.cuda.emulator import missing
from perilune.ops.kda import recurrent_kda_reference
from perilune.ops.kda.arguments import check
from perilune.ops.kda.gpu import autograd, forward, known
from perilune.ops.kda.gpu.forms import lay_out
from perilune.ops.kda.gpu.padded_plan import NEVER, Room

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LENGTHS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 63, 64, 65, 80, 81, 127, 128, 129)
WIDE = ("q", "k", "v", "g")
OPEN, CLOSED = {"bounded": -15.0, "softplus": -9.0}, {"bounded": 8.0, "softplus": 3.0}  # logits
SMALLEST = 1e-7  # beside inputs of about 1: below that a tensor's error is not relative to it
# A repeated key's writes almost cancel, each rounded to 2^-9; sums over all rows add their errors up.
LIMITS = {"A_log": 0.15, "dt_bias": 0.15}
LIMIT, LIMIT_OF_REPEATED_KEYS = 5e-2, 1.5e-1


@dataclass
class Case:
    """A call, and how it is to be run."""

    inputs: dict[str, Tensor]
    options: dict[str, object]
    offsets: tuple[int, ...]
    target: int
    width: int
    room: bool
    layout: str
    at_end: bool
    gate: str
    keys: str
    size: float
    cotangents: list[Tensor] = field(default_factory=list)

    @staticmethod
    def drawn(seed: int) -> Case:
        """The seed's call: 150 tokens at most."""
        choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        key_dim, value_dim = choose.choice((64, 128)), choose.choice((64, 128))
        qk_heads, group = choose.choice(((1, 1), (1, 2), (2, 1)))
        heads, room = qk_heads * group, choose.random() < 0.3
        lengths = [choose.choice(LENGTHS) for _ in range(choose.randint(1, 4))]
        while not 0 < sum(lengths) <= 150:
            lengths = [choose.choice(LENGTHS) for _ in range(choose.randint(1, 3))]
        offsets = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
        tokens, v_first = offsets[-1], choose.random() < 0.5
        gate, keys = (
            choose.choice(("bounded", "softplus")),
            choose.choice(("random", "random", "repeated", "absent", "large")),
        )
        sigmoid, size = choose.random() < 0.8, choose.choice((1.0, 1.0, 1e6, 1e-6))
        x = {
            "q": normal(1, tokens, qk_heads, key_dim), "k": normal(1, tokens, qk_heads, key_dim),
            "v": size * normal(1, tokens, heads, value_dim), "g": normal(1, tokens, heads, key_dim) - 1,
            "beta": normal(1, tokens, heads),
        }  # fmt: skip
        ends = choose.choice(("random", "random", "open", "closed", "at borders"))
        if ends != "random":
            x["g"][:] = CLOSED[gate] if ends == "closed" else OPEN[gate]
        if ends == "at borders":
            x["g"][:, 15::16], x["g"][:, 63::64] = CLOSED[gate], 100.0
        if keys == "repeated":
            x["k"][:] = x["k"][:, :1]
        if keys == "absent":
            x["k"][:, ::3], x["q"][:, ::4] = 0, 0
        if keys == "large":
            x["k"] *= 1e6
        if choose.random() < 0.3:
            x["beta"][:, ::3], x["beta"][:, 1::5] = 100.0, -100.0
        if not sigmoid:
            x["beta"] = x["beta"].sigmoid()
        inputs = {name: t.bfloat16() for name, t in x.items()}
        if choose.random() < 0.3:
            inputs["beta"] = inputs["beta"].float()
        if gate == "softplus" or choose.random() < 0.8:
            inputs["A_log"] = 0.3 * normal(heads) + choose.choice((0.0, 0.0, -4.0))
        if choose.random() < 0.8:
            inputs["dt_bias"] = normal(heads * key_dim)
        inner = (value_dim, key_dim) if v_first else (key_dim, value_dim)
        if not room and choose.random() < 0.6:
            inputs["initial_state"] = size * normal(len(lengths), heads, *inner)
        options: dict[str, object] = {
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": sigmoid,
            "lower_bound": choose.choice((-5.0, -0.5)) if gate == "bounded" else None, "safe_gate": gate == "bounded",
            "state_v_first": v_first, "output_final_state": not room and choose.random() < 0.7,
        }  # fmt: skip
        made = Case(
            inputs, options, offsets, choose.choice((NEVER, 1, 2)), choose.choice((64, value_dim)), room,
            choose.choice(("plain", "fused", "by heads", "every second row")), choose.random() < 0.5, gate, keys, size,
        )  # fmt: skip
        made.cotangents = [normal(1, tokens, heads, value_dim).bfloat16(), normal(len(lengths), heads, *inner)]
        return made

    def laid(self, guarded: GuardedMemory) -> dict[str, Tensor]:
        """The inputs as leaves between forbidden pages, in the case's layout, amid NaN."""
        found = {}
        for name, x in self.inputs.items():
            if name in WIDE and self.layout == "fused":
                found[name] = guarded.of(x.new_full((*x.shape[:3], x.shape[3] + 64), torch.nan))[
                    ..., 32 : 32 + x.shape[3]
                ]
            elif name in WIDE and self.layout == "by heads":
                found[name] = guarded.of(x.transpose(1, 2).contiguous()).transpose(1, 2)
            elif name in WIDE and self.layout == "every second row":
                found[name] = guarded.of(x.new_full((1, 2 * x.shape[1], *x.shape[2:]), torch.nan))[:, ::2]
            elif name == "beta" and self.layout != "plain":
                found[name] = guarded.of(x.new_full((*x.shape, 3), torch.nan))[..., 1]
            elif name == "initial_state" and self.layout != "plain":
                found[name] = guarded.of(x.transpose(-1, -2).contiguous()).transpose(-1, -2)
            else:
                found[name] = guarded.of(x)
            found[name].copy_(x)
        return {name: x.detach().requires_grad_() for name, x in found.items()}

    def outcome(self, leaves: dict[str, Tensor], call: Callable[[], tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
        """o, the final state, and every gradient."""
        o, state = call()
        outputs = [o] if state is None else [o, state]
        cotangents = [c.to(y.dtype) for c, y in zip(self.cotangents, outputs)]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, materialize_grads=True)
        found = {"o": o.detach().clone()} | {n: x.clone() for n, x in zip(leaves, gradients, strict=True)}
        return found if state is None else found | {"state": state.detach().clone()}

    def emulated(self, *, backwards: bool, form: bool) -> dict[str, Tensor] | None:
        """By the kernels; None if there is no form."""
        guarded = GuardedMemory(at_end=self.at_end != backwards)
        leaves, where = self.laid(guarded), {"cu_seqlens": self.offsets}
        if self.room:
            room = Room(self.offsets[-1], len(self.offsets) + 1, self.target, self.width)
            where = {"plan": room.plan(guarded.of(torch.from_numpy(room.filled(self.offsets))))}
        args = check(**leaves, **self.options, **where)
        with emulated(backwards), guarded:
            if not form:
                known.remember("none", None)
                return self.outcome(leaves, lambda: autograd.kda_gpu(args, "none"))
            found = lay_out(args, True)
            if found is None:
                return None
            given = [leaves.get(n) for n in (*WIDE, "beta", "A_log", "dt_bias", "initial_state")]
            return self.outcome(leaves, lambda: autograd._run(found, *given))

    def truth(self) -> dict[str, Tensor]:
        leaves = {name: x.double().requires_grad_() for name, x in self.inputs.items()}
        bounds = torch.tensor(self.offsets)
        return self.outcome(leaves, lambda: recurrent_kda_reference(**leaves, **self.options, cu_seqlens=bounds))

    def error(self, name: str, got: Tensor, truth: dict[str, Tensor]) -> float:
        """Relative to the truth; of sums over rows, to what is summed."""
        parts = truth[name]
        if name in ("A_log", "dt_bias"):
            logit = self.inputs["g"].double()
            if "dt_bias" in self.inputs:
                logit = logit + self.inputs["dt_bias"].double().view(logit.shape[2:])
            slope = logit if self.gate == "bounded" else torch.nn.functional.softplus(logit) / logit.sigmoid()
            parts = truth["g"] * slope if name == "A_log" else truth["g"]
        by_values = 1.0 if name in ("v", "initial_state") else self.size
        return float((got.double() - truth[name]).norm()) / max(float(parts.norm()), SMALLEST * by_values)


@pytest.mark.soak
def test_calls_drawn_at_random(count: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(count(full=400, reduced=4)):
        case = Case.drawn(seed)
        monkeypatch.setattr(forward, "fastest", lambda *_, case=case: (case.target, case.width))
        truth, first = case.truth(), case.emulated(backwards=False, form=False)
        assert first is not None
        errors = {name: case.error(name, x, truth) for name, x in first.items()}
        limit = LIMIT_OF_REPEATED_KEYS if case.keys == "repeated" else LIMIT
        assert all(e <= LIMITS.get(n, limit) for n, e in errors.items()), (seed, errors)
        for backwards, form in ((True, False), (False, True)):
            other = case.emulated(backwards=backwards, form=form)
            assert other is not None or (form and case.room), f"seed {seed} has no form"
            assert other is None or all(torch.equal(first[n], other[n]) for n in first), (seed, backwards, form)
    known.forget()
