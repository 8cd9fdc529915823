"""Rows of the experts that serve, on a GPU: packed MXFP4 weights for decode and prefill, few tokens on bfloat16 weights.

    python -m perilune.bench.gpu_experts [RESULTS.jsonl]

K3's sizes: 3584 channels, 3072 hidden units, 16 experts a token. A decode step is bound by reading the weights of the experts
that its tokens chose; prefill by its products. The peers multiply bfloat16 weights: torch's grouped product in prefill, the
loop over experts in decode.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from perilune.bench.gpu_decode import make_row, report
from perilune.bench.harness import Row, matmul_ceiling
from perilune.errors import ConfigError
from perilune.ops.moe import routed_experts, triton_decode
from perilune.ops.mx import DeviceWeight, packed_experts
from perilune.ops.situ_glu import situ_glu

WIDTH, HIDDEN, ACTIVE = 3584, 3072, 16
CAPS = (4.0, 25.0)
DECODE_EXPERTS, PREFILL_EXPERTS = 128, 16
BYTES = {"mxfp4": 17 / 32, "bfloat16": 2.0}  # of a weight


def packed(experts: int, rows: int, columns: int) -> DeviceWeight:
    """Random codes, all scales 2^-4."""
    steps = columns // 128
    codes = torch.randint(-(2**15), 2**15, (experts, steps, rows, 32), device="cuda", dtype=torch.int16)
    return DeviceWeight(
        codes, torch.full((experts, steps, rows), 0x79797979, device="cuda", dtype=torch.int32), columns
    )


def _dense(*shape: int) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).uniform_(-0.05, 0.05)


def _routes(tokens: int, experts: int, count: int) -> list[Tensor]:
    """Several draws of routes, so that a replay reads other experts than the one before."""
    return [torch.rand(tokens, experts, device="cuda").topk(ACTIVE).indices for _ in range(count)]


def _chosen_bytes(routes: list[Tensor], weight: str) -> float:
    """Bytes of the weights of the experts that a step's tokens chose, in the mean."""
    chosen = statistics.mean(len(index.unique()) for index in routes)
    return chosen * 3 * WIDTH * HIDDEN * BYTES[weight]


def _grouped(z: Tensor, weights: tuple[Tensor, ...], offsets: Tensor) -> Callable[[], Tensor]:
    """The three products and the gated unit of rows that lie sorted already."""
    w1, w3, w2 = (w.mT for w in weights)

    def call() -> Tensor:
        gate, up = (torch._grouped_mm(z, w, offs=offsets) for w in (w1, w3))
        return torch._grouped_mm(situ_glu(gate, up, *CAPS), w2, offs=offsets)

    return call


def prefill_rows() -> Iterator[Row]:
    """512 rows an expert, without and with activations in MXFP8."""
    tokens = 512 * PREFILL_EXPERTS // ACTIVE
    weights = packed(PREFILL_EXPERTS, HIDDEN, WIDTH), packed(PREFILL_EXPERTS, HIDDEN, WIDTH)
    down = packed(PREFILL_EXPERTS, WIDTH, HIDDEN)
    z, index = torch.randn(tokens, WIDTH, device="cuda").bfloat16(), _routes(tokens, PREFILL_EXPERTS, 1)[0]
    mix = torch.rand(tokens, ACTIVE, device="cuda")
    dense = _dense(PREFILL_EXPERTS, HIDDEN, WIDTH), _dense(PREFILL_EXPERTS, HIDDEN, WIDTH)
    dense = *dense, _dense(PREFILL_EXPERTS, WIDTH, HIDDEN)
    rows = torch.randn(tokens * ACTIVE, WIDTH, device="cuda").bfloat16()
    offsets = torch.arange(1, PREFILL_EXPERTS + 1, device="cuda", dtype=torch.int32) * (len(rows) // PREFILL_EXPERTS)
    peer = _grouped(rows, dense, offsets)
    bound = 1e3 * 6.0 * len(rows) * WIDTH * HIDDEN / matmul_ceiling("cuda", torch.bfloat16)
    for name, activations in (("", "none"), ("_mxfp8", "mxfp8")):
        row = make_row(
            f"mxfp4_prefill{name}", f"{tokens} tokens, {ACTIVE} of {PREFILL_EXPERTS} experts, {WIDTH} x {HIDDEN}",
            [lambda kind=activations: packed_experts(z, index, mix, *weights, down, activations=kind)] * 2, 0.0,
            "bf16 torch._grouped_mm, sorted rows, no gather or sum", [peer] * 2,
        )  # fmt: skip
        yield replace(row, bound_ms=bound)


def packed_decode_rows() -> Iterator[Row]:
    """1 and 16 tokens on packed weights."""
    weights = packed(DECODE_EXPERTS, HIDDEN, WIDTH), packed(DECODE_EXPERTS, HIDDEN, WIDTH)
    down = packed(DECODE_EXPERTS, WIDTH, HIDDEN)
    for tokens in (1, 16):
        z, mix = torch.randn(tokens, WIDTH, device="cuda").bfloat16(), torch.rand(tokens, ACTIVE, device="cuda")
        routes = _routes(tokens, DECODE_EXPERTS, 6)
        calls = [lambda i=i, z=z, mix=mix: packed_experts(z, i, mix, *weights, down) for i in routes]
        yield make_row(
            f"mxfp4_decode_N{tokens}", f"{tokens} tokens, {ACTIVE} of {DECODE_EXPERTS} experts, {WIDTH} x {HIDDEN}",
            calls, _chosen_bytes(routes, "mxfp4"),
        )  # fmt: skip


def dense_decode_rows() -> Iterator[Row]:
    """1 and 8 tokens on bfloat16 weights."""
    dense = _dense(DECODE_EXPERTS, HIDDEN, WIDTH), _dense(DECODE_EXPERTS, HIDDEN, WIDTH)
    dense = *dense, _dense(DECODE_EXPERTS, WIDTH, HIDDEN)
    for tokens in (1, 8):
        z, mix = torch.randn(tokens, WIDTH, device="cuda").bfloat16(), torch.rand(tokens, ACTIVE, device="cuda")
        routes = _routes(tokens, DECODE_EXPERTS, 4)
        calls = [lambda i=i, z=z, mix=mix: triton_decode.experts(z, i, mix, *dense, CAPS) for i in routes]
        peers = [lambda i=i, z=z, mix=mix: routed_experts(z, i, mix, *dense) for i in routes]
        yield make_row(
            f"moe_decode_N{tokens}", f"{tokens} tokens, {ACTIVE} of {DECODE_EXPERTS} experts, {WIDTH} x {HIDDEN}, bf16",
            calls, _chosen_bytes(routes, "bfloat16"), "grouped products of this package", peers,
        )  # fmt: skip


def run(results: Path | None = None) -> list[Row]:
    """Measure all rows; print them and append them to `results`.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("these rows need a CUDA device; torch sees none")
    rows = []
    for part in (packed_decode_rows, dense_decode_rows, prefill_rows):
        for row in part():
            report(row, results)
            rows.append(row)
    return rows


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
