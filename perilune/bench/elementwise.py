"""Bench cases of the row operations: norms, short convolution, gated units, attention over depth, cross-entropy.

The peer is what one writes in plain torch, run eagerly with autograd. All but the cross-entropy are bound by memory, so
a case also says how many bytes an ideal implementation moves: each input read once, each result written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.attnres import mix
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.norm import gated_rms_norm, rms_norm
from perilune.ops.short_conv import short_conv
from perilune.ops.situ_glu import situ_glu, swiglu

PEER = "torch eager"
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ElementwiseCase:
    """One operation at one shape.

    Attributes:
        name: row name without the suffix `_fwd` or `_fwdbwd`.
        shape: sizes, for the row.
        inputs: tensors that require gradients, made anew at each call.
        ours, peer: the operation from its inputs to one tensor.
        forward_bytes: least traffic of a forward pass.
        backward_bytes: least traffic of the backward pass alone.
        forward_flops: of a forward pass, where products and not bytes set the pace; backward counts twice that.
    """

    name: str
    shape: str
    inputs: Callable[[], list[Tensor]]
    ours: Callable[..., Tensor]
    peer: Callable[..., Tensor]
    forward_bytes: int
    backward_bytes: int
    forward_flops: float = 0.0

    def forward(self, function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Tensor]:
        """What to time for `_fwd`: the operation without gradients."""

        def run() -> Tensor:
            with torch.no_grad():
                return function(*inputs)

        return run

    def forward_backward(
        self, function: Callable[..., Tensor], inputs: list[Tensor]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """What to time for `_fwdbwd`: the operation, and the gradients of all inputs for a fixed cotangent."""
        with torch.no_grad():
            cotangent = torch.randn(function(*inputs).shape)
        return lambda: torch.autograd.grad(function(*inputs), inputs, cotangent)


def cases(tokens: int = 4096, width: int = 512, vocabulary: int = 4096) -> list[ElementwiseCase]:
    """All cases at one size, float32 on the CPU.

    Args:
        tokens: rows, a multiple of 8 (the convolution runs 8 sequences).
        width: channels, a multiple of 64 (the gated norm's head).
        vocabulary: of the cross-entropy's head, which is as wide as `width`.
    """
    size = 4 * tokens * width
    shape = f"N={tokens} D={width}"

    def leaves(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.randn(shape).requires_grad_() for shape in shapes]

    rows, target = (tokens, width), torch.arange(tokens) % vocabulary
    return [
        ElementwiseCase(
            name="rms_norm", shape=shape, inputs=leaves(rows, (width,)), forward_bytes=2 * size, backward_bytes=3 * size,
            ours=lambda x, w: rms_norm(x, w, EPS), peer=lambda x, w: F.rms_norm(x, (width,), w, EPS),
        ),
        ElementwiseCase(
            name="gated_rms_norm", shape=f"N={tokens} H={width // 64} V=64", forward_bytes=3 * size, backward_bytes=5 * size,
            inputs=leaves((tokens, width // 64, 64), (tokens, width // 64, 64), (64,)),
            ours=lambda o, g, w: gated_rms_norm(o, g, w, EPS), peer=lambda o, g, w: F.rms_norm(o, (64,), w, EPS) * g.sigmoid(),
        ),
        ElementwiseCase(
            name="short_conv", shape=f"B=8 T={tokens // 8} X={width} W=4", forward_bytes=2 * size, backward_bytes=3 * size,
            inputs=leaves((8, tokens // 8, width), (width, 4)), ours=lambda x, w: short_conv(x, w)[0], peer=_plain_conv,
        ),
        ElementwiseCase(
            name="situ_glu", shape=shape, inputs=leaves(rows, rows), forward_bytes=3 * size, backward_bytes=5 * size,
            ours=situ_glu, peer=lambda a, b: 4 * torch.tanh(a / 4) * a.sigmoid() * 25 * torch.tanh(b / 25),
        ),
        ElementwiseCase(
            name="swiglu", shape=shape, inputs=leaves(rows, rows), forward_bytes=3 * size, backward_bytes=5 * size,
            ours=swiglu, peer=lambda a, b: F.silu(a) * b,
        ),
        *[
            ElementwiseCase(
                name=f"attnres_mix{sources}", shape=f"M={sources} {shape}", inputs=leaves((width,), *[rows] * sources),
                forward_bytes=(sources + 1) * size, backward_bytes=(2 * sources + 1) * size,
                ours=lambda c, *sources: mix(sources, c, EPS), peer=_plain_mix,
            )
            for sources in (3, 9)
        ],
        ElementwiseCase(
            name="linear_cross_entropy", shape=f"{shape} Z={vocabulary}", inputs=leaves(rows, (vocabulary, width)),
            forward_bytes=size + 4 * vocabulary * width, backward_bytes=size + 4 * vocabulary * width,
            forward_flops=2.0 * tokens * width * vocabulary,
            ours=lambda x, w: linear_cross_entropy(x, w, target), peer=lambda x, w: F.cross_entropy(x @ w.t(), target),
        ),
    ]  # fmt: skip


def _plain_conv(x_BTX: Tensor, weight_XW: Tensor) -> Tensor:
    width, taps = weight_XW.shape
    padded = F.pad(x_BTX.transpose(1, 2), (taps - 1, 0))
    return F.silu(F.conv1d(padded, weight_XW[:, None], groups=width)).transpose(1, 2)


def _plain_mix(score_weight_D: Tensor, *sources: Tensor) -> Tensor:
    stacked_MND = torch.stack(sources)
    keys = F.rms_norm(stacked_MND, stacked_MND.shape[-1:], None, EPS)
    return torch.einsum("mn,mnd->nd", (keys @ score_weight_D).softmax(0), stacked_MND)
