"""Rows of the experts that serve, on a GPU: packed MXFP4 weights for decode and prefill, few tokens on bfloat16 weights.

K3's sizes: 3584 channels, 3072 hidden units, 16 experts a token. A decode step is bound by reading the weights of the experts
that its tokens chose; prefill by its products. The peers read bfloat16 weights: torch's grouped products, and for a few
tokens this package's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.bench.gpu_moe import PEER, grouped_mm_chain
from perilune.bench.graphs import Calls, GraphCase
from perilune.ops.moe import routed_experts, triton_decode
from perilune.ops.mx import DeviceWeight, packed_experts

WIDTH, HIDDEN, ACTIVE = 3584, 3072, 16
CAPS = (4.0, 25.0)
DECODE_EXPERTS, PREFILL_EXPERTS = 128, 16
PREFILL_ROWS = 512  # an expert
MXFP4_BYTES = 17 / 32  # of a weight, scales included


def packed(experts: int) -> tuple[DeviceWeight, DeviceWeight, DeviceWeight]:
    """Random codes of the three matrices of each expert, all scales 2^-5."""

    def one(rows: int, columns: int) -> DeviceWeight:
        shape = experts, columns // 128, rows
        codes = torch.randint(-(2**15), 2**15, (*shape, 32), device="cuda", dtype=torch.int16)
        return DeviceWeight(codes, torch.full(shape, 0x78787878, device="cuda", dtype=torch.int32), columns)

    return one(HIDDEN, WIDTH), one(HIDDEN, WIDTH), one(WIDTH, HIDDEN)


def dense(experts: int) -> list[Tensor]:
    """The three stacks in bfloat16."""
    shapes = (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    return [torch.empty(experts, *s, device="cuda", dtype=torch.bfloat16).uniform_(-0.05, 0.05) for s in shapes]


def _routes(tokens: int, count: int) -> list[Tensor]:
    """Several draws of routes, so that a replay reads other experts each time."""
    torch.manual_seed(0)
    return [torch.rand(tokens, DECODE_EXPERTS, device="cuda").topk(ACTIVE).indices for _ in range(count)]


def _traffic(tokens: int, weight_bytes: float) -> float:
    """Bytes of the weights that a step's tokens chose, as expected of even routes."""
    chosen = DECODE_EXPERTS * (1 - (1 - ACTIVE / DECODE_EXPERTS) ** tokens)
    return chosen * 3 * WIDTH * HIDDEN * weight_bytes


def _tokens(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, WIDTH, device="cuda").bfloat16(), torch.rand(tokens, ACTIVE, device="cuda")


def _packed_step(tokens: int) -> tuple[Calls, Calls]:
    (z, mix), weights = _tokens(tokens), packed(DECODE_EXPERTS)
    return [lambda i=i: packed_experts(z, i, mix, *weights) for i in _routes(tokens, 6)], []


def _dense_step(tokens: int) -> tuple[Calls, Calls]:
    (z, mix), weights = _tokens(tokens), dense(DECODE_EXPERTS)
    routes = _routes(tokens, 4)
    ours = [lambda i=i: triton_decode.experts(z, i, mix, *weights, CAPS) for i in routes]
    return ours, [lambda i=i: routed_experts(z, i, mix, *weights) for i in routes]


def _prefill(activations: str) -> tuple[Calls, Calls]:
    tokens = PREFILL_ROWS * PREFILL_EXPERTS // ACTIVE
    (z, mix), weights, matrices = _tokens(tokens), packed(PREFILL_EXPERTS), dense(PREFILL_EXPERTS)
    index = torch.rand(tokens, PREFILL_EXPERTS, device="cuda").topk(ACTIVE).indices
    ours = [lambda: packed_experts(z, index, mix, *weights, activations=activations)] * 2
    return ours, [lambda: grouped_mm_chain(z, index, mix, *matrices)] * 2


def cases() -> Iterator[GraphCase]:
    """Decode on packed weights, decode on bfloat16 weights, prefill without and with rounded activations."""
    sizes = f"{ACTIVE} of {DECODE_EXPERTS} experts, {WIDTH} x {HIDDEN}"
    for tokens in (1, 16):
        yield GraphCase(
            name=f"mxfp4_decode_N{tokens}", shape=f"{tokens} tokens, {sizes}", bytes=_traffic(tokens, MXFP4_BYTES),
            make=lambda n=tokens: _packed_step(n),
        )  # fmt: skip
    for tokens in (1, 8):
        yield GraphCase(
            name=f"moe_decode_N{tokens}", shape=f"{tokens} tokens, {sizes}, bf16", bytes=_traffic(tokens, 2.0),
            make=lambda n=tokens: _dense_step(n), peer="grouped products of this package",
        )  # fmt: skip
    for suffix, activations in (("", "none"), ("_mxfp8", "mxfp8")):
        yield GraphCase(
            name=f"mxfp4_prefill{suffix}",
            shape=f"{PREFILL_ROWS} rows an expert, {PREFILL_EXPERTS} experts, {WIDTH} x {HIDDEN}",
            make=lambda kind=activations: _prefill(kind), peer=f"bf16 {PEER}",
            flops=6.0 * PREFILL_ROWS * PREFILL_EXPERTS * WIDTH * HIDDEN,
        )  # fmt: skip
