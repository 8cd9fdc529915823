"""Gated units inside of kernels, for an epilogue in which every special-function result counts.

With u = e^(-2a / beta) and s = e^-a the gate side is beta (1 - u) / ((1 + u)(1 + s)): two exponentials and a reciprocal; one
exponential less for beta = 4, where s = u^2. Exponents are bounded, so that no product overflows: below -56 the sigmoid
stays at e^-56, which is nothing beside any other number here. NaN stays NaN.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.moe.triton.tiles import INTERPRET

Caps = tuple[float, float | None] | None  # (beta, linear_beta) of SiTU; None = SwiGLU

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-56.0)  # of a sigmoid's argument
_MOST = tl.constexpr(40.0)  # of the base-2 exponent in a tanh, which is then 1 to 2^-40


@triton.jit
def _reciprocal(x):
    """1 / x in one instruction."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _bounded(exponent):
    return tl.exp2(tl.minimum(exponent, _MOST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _gate_powers(a, beta, FOUR: tl.constexpr):
    """u and s."""
    x = tl.maximum(a, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    if FOUR:
        u = tl.exp2(x * (-0.5 * _LOG2E))
        return u, u * u
    return _bounded(x * (-2.0 * _LOG2E / beta)), tl.exp2(x * -_LOG2E)


@triton.jit
def gated_unit(a, b, beta, linear_beta, FOUR: tl.constexpr, GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr):
    """beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta); a sigmoid(a) b without the caps."""
    if GATE_CAPPED:
        u, s = _gate_powers(a, beta, FOUR)
        left = beta * (1.0 - u) * _reciprocal((1.0 + u) * (1.0 + s))
    else:
        x = tl.maximum(a, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
        left = a * _reciprocal(1.0 + tl.exp2(x * -_LOG2E))
    if UP_CAPPED:
        v = _bounded(b * (-2.0 * _LOG2E / linear_beta))
        return left * (linear_beta * (1.0 - v) * _reciprocal(1.0 + v))
    return left * b


@triton.jit
def gated_slopes(a, b, beta, linear_beta, FOUR: tl.constexpr, GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr):
    """The unit and its derivatives by a and by b."""
    if GATE_CAPPED:
        u, s = _gate_powers(a, beta, FOUR)
        r = _reciprocal((1.0 + u) * (1.0 + s))
        inverse, opened = r * (1.0 + s), r * (1.0 + u)
        cap = beta * (1.0 - u) * inverse
        slope = 4.0 * u * inverse * inverse  # 1 - tanh^2: zero where the cap is reached
    else:
        x = tl.maximum(a, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
        s = tl.exp2(x * -_LOG2E)
        opened = _reciprocal(1.0 + s)
        cap, slope = a, tl.full(a.shape, 1.0, tl.float32)
    left = cap * opened
    by_a = opened * slope + left * (s * opened)  # 1 - sigmoid = s sigmoid, without a difference
    if UP_CAPPED:
        v = _bounded(b * (-2.0 * _LOG2E / linear_beta))
        inverse = _reciprocal(1.0 + v)
        right = linear_beta * (1.0 - v) * inverse
        return left * right, by_a * right, left * (4.0 * v * inverse * inverse)
    return left * b, by_a * b, left


def unit_options(caps: Caps) -> dict[str, float | bool]:
    """What a kernel with a gated unit takes for these caps."""
    beta, linear_beta = caps or (0.0, None)
    return {
        "beta": beta,
        "linear_beta": linear_beta or 0.0,
        "FOUR": beta == 4.0,
        "GATE_CAPPED": caps is not None,
        "UP_CAPPED": linear_beta is not None,
    }
