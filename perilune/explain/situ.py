"""SiTU-GLU: SwiGLU near zero, bounded far from it."""

from __future__ import annotations

import torch

from perilune.explain.chart import LineChart, Series
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.ops.situ_glu import situ_glu, situ_glu_reference, swiglu


def explain(subject: Subject) -> Explanation:
    """The curve, its slope, and the bound, with the caps of the model."""
    cfg = subject.cfg
    gate_cap, up_cap = cfg.situ_beta, cfg.situ_linear_beta
    bound = gate_cap * up_cap if up_cap is not None else float("inf")
    x = torch.linspace(-30, 30, 241, dtype=torch.float64)
    capped, free, slope = along_diagonal(x, gate_cap, up_cap)
    huge = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    g, u = torch.meshgrid(huge, huge, indexing="ij")
    largest = float(situ_glu(g, u, gate_cap, up_cap).abs().max())
    near = torch.linspace(-0.5, 0.5, 101, dtype=torch.float64)
    difference = float((situ_glu(near, near, gate_cap, up_cap) - swiglu(near, near)).abs().max())
    at_ten = float(slope[int((x - 10).abs().argmin())])
    charts = [
        LineChart(
            title="gate = up = x",
            series=[
                Series(name="SiTU-GLU", x=x.tolist(), y=capped.tolist()),
                Series(name="SwiGLU", x=x.tolist(), y=free.tolist(), style="dash"),
            ],
            x_label="x",
            y_label="output",
            y_range=(-10.0, 1.25 * min(bound, 200.0)),
            horizontals=[(bound, f"bound {gate_cap:g} · {up_cap:g}")] if up_cap is not None else [],
            caption="Equal near zero; SwiGLU then grows with x², SiTU-GLU bends towards its bound.",
        ),
        LineChart(
            title="Slope of SiTU-GLU",
            series=[Series(name="derivative along gate = up", x=x.tolist(), y=slope.tolist(), color=2)],
            x_label="x",
            y_label="d output / d x",
            caption="The slope falls smoothly and never jumps to zero, as it would under a hard clamp.",
        ),
    ]
    return Explanation(
        name="situ",
        title="SiTU-GLU",
        source="K3 report §2.3.2, Eq. 12, App. B",
        formula=(
            "SwiGLU(g, u) = g σ(g) · u",
            f"SiTU(g, u)   = β₁ tanh(g/β₁) σ(g) · β₂ tanh(u/β₂)        β₁ = {gate_cap:g}, β₂ = {up_cap if up_cap is None else f'{up_cap:g}'}",
            "softcap(z) = z + O(z³/β²), so both agree to first order; |SiTU| < β₁ β₂",
        ),
        unusual=(
            "The caps are tanh, not clamps: gradients stay non-zero everywhere.",
            "The sigmoid reads the raw gate, only the linear factor is capped.",
            "With about a thousand experts some see few tokens; a bounded unit keeps one of them from exploding.",
        ),
        reference=situ_glu_reference,
        findings=[
            f"At |g| = |u| = 10,000 the output is at most {largest:.4g}; the bound is {bound:g}.",
            f"For |x| ≤ 0.5 it differs from SwiGLU by at most {difference:.1e}.",
            f"At x = 10 the slope is still {at_ten:.3g}; at x = 30 it is {float(slope[-1]):.3g}.",
        ],
        numbers={
            "bound": bound if up_cap is not None else None,
            "largest_output": largest,
            "difference_near_zero": difference,
            "slope_at_10": at_ten,
        },
        charts=charts,
        next=("perilune explain latent_moe",),
    )


def along_diagonal(
    x: torch.Tensor, gate_cap: float, up_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SiTU(x, x), SwiGLU(x, x), and the derivative of the first along x, all fp64."""
    given = x.clone().requires_grad_(True)
    out = situ_glu(given, given, gate_cap, up_cap)
    (slope,) = torch.autograd.grad(out.sum(), given)
    return out.detach(), swiglu(x, x), slope
