"""How exact chunk_kda is on one GPU in bfloat16, beside fla-core on equal inputs: outputs, states and every gradient.

Both are compared with the token loop in float64 on what bfloat16 made of the inputs. A row has the time of a forward and a
backward pass as any row, and in its `extra` the relative error of each tensor, ours and the peer's (`peer_error_...`), the root
mean square over several draws. Errors of A_log and dt_bias are relative to the terms that add up to them, which may cancel to
almost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perilune.bench import gpu_kda
from perilune.bench.harness import Case, Row
from perilune.ops.kda import recurrent_kda_reference

# Many short sequences rather than few long: beta's gradient is almost all in the last token of a sequence and head, which the
# final state's cotangent reaches unforgotten. Of 24 such numbers the errors of two equally exact ways differ by up to 1.4 times,
# of these 2,048 by a fortieth.
BATCH, LENGTH, HEADS, DIM = 32, 128, 16, gpu_kda.DIM
DRAWS = 4
Inputs = dict[str, Tensor]


def _random(seed: int) -> Inputs:
    """As a layer passes them, with a state that came before."""
    made = gpu_kda.inputs(BATCH, LENGTH, HEADS, seed)
    generator = torch.Generator(device="cuda").manual_seed(seed + 1)
    made["initial_state"] = torch.randn(BATCH, HEADS, DIM, DIM, device="cuda", generator=generator)
    return made


def _open(seed: int) -> Inputs:
    """Nothing is forgotten."""
    made = _random(seed)
    made["g"][:] = -12.0
    return made


def _collinear(seed: int) -> Inputs:
    """Nothing is forgotten, keys hardly differ, and each overwrites what the one before wrote."""
    made = _open(seed)
    made["k"] = (made["k"][:, :1].float() + 0.3 * made["k"].float()).bfloat16()
    made["beta"][:] = 8.0
    return made


def _one_key(seed: int) -> Inputs:
    made = _open(seed)
    made["k"][:] = made["k"][:, :1].clone()
    made["beta"][:] = 8.0
    return made


def _closed(seed: int) -> Inputs:
    """Everything is forgotten at once."""
    made = _random(seed)
    made["g"][:] = 8.0
    return made


KINDS: dict[str, Callable[[int], Inputs]] = {
    "random": _random, "open_gate": _open, "collinear_keys": _collinear, "one_key": _one_key, "closed_gate": _closed,
}  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """A way from logits to decays.

    Attributes:
        title: as a row's shape names it.
        settings: of `chunk_kda` and of the peer.
        peer: the peer's name with these settings.
        task: of `bench.precompile`.
    """

    title: str
    settings: dict[str, Any]
    peer: str
    task: str


GATES = {
    "": Gate("bounded gate", gpu_kda.SETTINGS, "fla-core chunk_kda, safe gate", "kda"),
    "softplus_": Gate("softplus gate", gpu_kda.SOFTPLUS, "fla-core chunk_kda", "kda_softplus"),
}


def outcome(op: Callable[..., Any], inputs: Inputs, settings: dict[str, Any]) -> Inputs:
    """o, the final state, and every gradient under fixed cotangents, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, state = op(**leaves, output_final_state=True, **settings)
    generator = torch.Generator(device="cuda").manual_seed(7)
    cotangents = [torch.randn(x.shape, device="cuda", generator=generator).bfloat16().to(x.dtype) for x in (o, state)]
    gradients = torch.autograd.grad([o, state], list(leaves.values()), cotangents)
    return {"o": o.detach(), "state": state.detach()} | {f"d_{n}": x for n, x in zip(leaves, gradients, strict=True)}


def truth(inputs: Inputs, settings: dict[str, Any]) -> Inputs:
    """`outcome` of the token loop in float64."""
    return outcome(recurrent_kda_reference, {name: x.double() for name, x in inputs.items()}, settings)


def errors(got: Inputs, right: Inputs, inputs: Inputs) -> dict[str, float]:
    """Norm of the error beside the norm of the truth, by tensor; NaN if one is not finite."""
    logit = inputs["g"].double() + inputs["dt_bias"].double().view(*inputs["g"].shape[2:])
    beside = right | {"d_dt_bias": right["d_g"], "d_A_log": right["d_g"] * logit}
    return {name: float((got[name].double() - right[name]).norm() / beside[name].norm()) for name in right}


def compared(kind: str, settings: dict[str, Any], *ops: Callable[..., Any]) -> list[dict[str, float]]:
    """For each of `ops` its errors on inputs of this kind, the root mean square over `DRAWS` draws."""
    squares: list[dict[str, float]] = [{} for _ in ops]
    for seed in range(DRAWS):
        inputs = KINDS[kind](10 * seed)
        right = truth(inputs, settings)
        for op, sums in zip(ops, squares, strict=True):
            for name, error in errors(outcome(op, inputs, settings), right, inputs).items():
                sums[name] = sums.get(name, 0.0) + error**2 / DRAWS
    return [{name: total**0.5 for name, total in sums.items()} for sums in squares]


@dataclass(frozen=True, kw_only=True)
class AccuracyCase(Case):
    """A row with errors.

    Attributes:
        kind: of inputs, in `KINDS`.
        settings: of the gate.
    """

    kind: str
    settings: dict[str, Any]

    def measure(self, device: str, samples: int) -> Row:
        """As `Case.measure`."""
        row, other = super().measure(device, samples), gpu_kda.peer()
        found = compared(self.kind, self.settings, gpu_kda.ours, *([] if other is None else [other]))
        named = zip(("error", "peer_error"), found)
        return replace(row, extra=row.extra | {f"{p}_{n}": error for p, each in named for n, error in each.items()})


def cases() -> Iterator[AccuracyCase]:
    """A row for each gate and kind of inputs."""
    other = gpu_kda.peer()
    for (mark, gate), kind in itertools.product(GATES.items(), KINDS):

        def make(kind: str = kind, gate: Gate = gate) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
            inputs = KINDS[kind](0)
            run = partial(outcome, inputs=inputs, settings=gate.settings)
            return partial(run, gpu_kda.ours), None if other is None else partial(run, other)

        yield AccuracyCase(
            name=f"kda_accuracy_{mark}{kind}",
            shape=f"B {BATCH}, T {LENGTH}, H {HEADS}, d {DIM}, {gate.title}, forward and backward",
            make=make,
            peer="" if other is None else gate.peer,
            flops=BATCH * LENGTH * HEADS * sum(gpu_kda.FLOPS.values()),
            bytes=BATCH * LENGTH * HEADS * sum(gpu_kda.BYTES.values()),
            dtype=torch.bfloat16,
            precompile=() if other is None else (f"{gate.task}:{HEADS}",),
            kind=kind,
            settings=gate.settings,
        )
