"""Per-head Muon: every head's update has the same size, however loud its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.explain.chart import Bars, LineChart, Series
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.ops.newton_schulz import newton_schulz
from perilune.optim.groups import Cut, treatment
from perilune.optim.muon import Muon, blocks

HEADS, HEAD_DIM, WIDTH, LOUD = 8, 32, 256, 50.0
DIRECTIONS = 16
"""Input directions of the example. All heads read the same few strong directions of x, so their gradients share them."""


def explain(subject: Subject) -> Explanation:
    """Update size by head with one loud head; singular values before and after; real gradients of the model."""
    gradient = shared_input_gradient()
    per_head = update_rms(gradient, (Cut(0, HEADS * HEAD_DIM, HEAD_DIM, 0, HEAD_DIM),))
    whole = update_rms(gradient, (Cut(0, HEADS * HEAD_DIM, HEADS * HEAD_DIM, 0, HEADS * HEAD_DIM),))
    before, after = spectrum(torch.randn(HEAD_DIM, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(0)))
    name, real_gradient, real_update = model_heads(subject)
    heads = [f"head {i}" for i in range(HEADS)]
    charts = [
        Bars(
            title=f"Update size when head 0 has a {LOUD:g}× gradient",
            categories=heads,
            groups=[("one matrix a head", per_head), ("whole matrix", whole)],
            y_label="RMS of the update ÷ learning rate",
            caption="Heads read the same inputs: in one matrix the loud head takes their common directions and the others hardly move.",
        ),
        LineChart(
            title="Singular values of a random head, before and after five steps",
            series=[
                Series(name="momentum", x=list(range(len(before))), y=before),
                Series(name="update", x=list(range(len(after))), y=after),
            ],
            x_label="singular value, by rank",
            y_label="÷ the largest",
            caption="All directions are brought close to the same length, so rare directions learn as fast as common ones.",
        ),
        Bars(
            title=f"{name}: gradient of the text's loss, and Muon's update",
            categories=[f"head {i}" for i in range(len(real_gradient))],
            groups=[("gradient ÷ its mean", relative(real_gradient)), ("update ÷ its mean", relative(real_update))],
            y_label="RMS of a head ÷ mean",
            caption="The heads' gradients differ in size; their updates do not.",
        ),
    ]
    return Explanation(
        name="muon",
        title="Per-head Muon",
        source="K3 report §2.5",
        formula=(
            "M ← μ M + G,   N = G + μ M                    Nesterov momentum, μ = 0.95",
            "Oₕ = NewtonSchulz₅(Nₕ)                         for each head's rows Nₕ on their own",
            "Wₕ ← (1 − lr·wd) Wₕ − lr · 0.2 √max(rows, cols) · Oₕ",
            "NewtonSchulz:  A = X Xᵀ,  X ← 3.4445 X + (−4.775 A + 2.0315 A²) X,  five times",
        ),
        unusual=(
            "The update is orthogonalised: only the momentum's directions count, not their sizes.",
            "Q, K and V are cut along heads first; other matrices that have heads follow in this package (our choice).",
            "Blocks of equal shape are stacked over layers and heads into one batched product.",
            "Embeddings, head, router, norms and all vectors stay with AdamW.",
        ),
        reference=Muon.step,
        findings=[
            f"Update of the loud head ÷ mean of the others: {per_head[0] / (sum(per_head[1:]) / (HEADS - 1)):.2f} per head, "
            f"{whole[0] / (sum(whole[1:]) / (HEADS - 1)):.2f} as a whole matrix.",
            f"Singular values ÷ largest span {before[-1]:.2f}–1 in the momentum and {after[-1]:.2f}–1 in the update.",
            f"{name} of {subject.label}: largest ÷ smallest head is {max(real_gradient) / max(min(real_gradient), 1e-30):.2f} in the gradient "
            f"and {max(real_update) / min(real_update):.2f} in the update.",
        ],
        numbers={
            "update_rms_per_head": per_head,
            "update_rms_whole": whole,
            "singular_values_momentum": before,
            "singular_values_update": after,
            "model": {"parameter": name, "gradient_rms": real_gradient, "update_rms": real_update},
        },
        charts=charts,
        next=(
            "perilune explain qk_clip",
            "perilune ablate --preset nano --vary optimizer=muon,muon_whole,adamw --seeds 3",
        ),
    )


def shared_input_gradient() -> Tensor:
    """Gradient `[H*d, D]` = dYᵀ X of heads that read the same few directions of x; head 0 is `LOUD` times louder."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(DIRECTIONS, HEADS * HEAD_DIM, generator=generator)
    out[:, :HEAD_DIM] *= LOUD
    return out.T @ torch.randn(DIRECTIONS, WIDTH, generator=generator)


def update_rms(gradient: Tensor, cuts: tuple[Cut, ...]) -> list[float]:
    """RMS of each head's rows in one Muon step of learning rate 1 from zero weights."""
    weight = torch.zeros_like(gradient).requires_grad_(True)
    weight.grad = gradient.clone()
    Muon({"w": weight}, {"w": cuts}, weight_decay=0.0, dtype=torch.float32).step(1.0)
    return weight.detach().view(HEADS, HEAD_DIM, WIDTH).square().mean((1, 2)).sqrt().tolist()


def spectrum(momentum: Tensor) -> tuple[list[float], list[float]]:
    """Singular values before and after Newton–Schulz, each divided by its largest."""
    values = [
        torch.linalg.svdvals(matrix.double()) for matrix in (momentum, newton_schulz(momentum, dtype=torch.float32))
    ]
    before, after = ((value / value.max()).tolist() for value in values)
    return before, after


def model_heads(subject: Subject) -> tuple[str, list[float], list[float]]:
    """The first parameter that is cut along heads: RMS a head of its gradient on the text, and of its Muon update."""
    model = subject.model
    ids_BT = subject.ids_BT
    name, parameter, cuts = next(
        (name, parameter, found.cuts)
        for name, parameter in model.named_parameters()
        if name.startswith("layers.") and (found := treatment(name, tuple(parameter.shape), subject.cfg)).rule == "muon" and found.cuts[0].count > 1
    )  # fmt: skip
    with torch.enable_grad():
        result = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        (gradient,) = torch.autograd.grad(result.nats / result.tokens, parameter)
    copy = torch.zeros_like(parameter).requires_grad_(True)
    copy.grad = gradient
    Muon({name: copy}, {name: cuts}, weight_decay=0.0, dtype=torch.float32).step(1.0)

    def rms(matrix: Tensor) -> list[float]:
        return [value for cut in cuts for value in blocks(matrix, cut).square().mean((1, 2)).sqrt().tolist()]

    return name, rms(gradient.contiguous()), rms(copy.detach())


def relative(values: list[float]) -> list[float]:
    """Each value over their mean."""
    mean = sum(values) / len(values)
    return [value / mean for value in values] if mean else values
