"""Rows of MLA on a GPU: absorbed decode against a long cache, and causal attention with an fp32 output as in training.

A decode step is whole: both up-projections, the attention and what puts its parts together. It is bound by one read of the
cache, or by the products of all heads with it; its peer is torch's attention on keys and values that were expanded before,
which is what a cache without latents would be. The peer in training is cuDNN's kernel, the fastest that torch has for the same
shape; its output is rounded to bfloat16. Packed documents are of one length, so that the peer can take them as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.bench.graphs import Calls, GraphCase, sets
from perilune.bench.harness import Case
from perilune.ops.mla import attend, attend_cached
from perilune.ops.segments import Segments

LATENT, SHARED, NOPE, VALUE = 512, 64, 128, 128
SCALE = (NOPE + SHARED) ** -0.5
DECODE_SHAPES = [
    (b, h, s) for b, s in ((1, 32768), (1, 131072), (16, 4096), (16, 32768)) for h in (12, 48, 96)
]  # B, H, S
RAGGED = tuple(512 * n * n // 4 + 512 for n in range(16))  # cached tokens of a batch whose sequences differ
K3, MINI = (NOPE + SHARED, VALUE), (96, 64)  # channels of a key and of a value
TRAINING_SHAPES = (
    (1, 8192, 96, K3),
    (4, 2048, 96, K3),
    (1, 32768, 12, K3),
    (1, 8192, 16, MINI),
)  # documents, T of each, H, widths
PEER_BYTES = 20e9  # of expanded keys and values, beyond which the peer is left out


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def decode_call(batch: int, heads: int, cached: int, lengths: Sequence[int] | None = None) -> Callable[[], Tensor]:
    """One step of every sequence, up-projections and the attention between them; `cached` tokens each, or `lengths`."""
    q, q_shared = _normal(batch, 1, heads, NOPE), _normal(batch, 1, heads, SHARED)
    w_uk, w_uv = _normal(heads, NOPE, LATENT) / 23, _normal(heads, VALUE, LATENT) / 23
    cache = _normal(batch, cached, LATENT + SHARED)
    length = torch.tensor(lengths or [cached] * batch, dtype=torch.int32, device="cuda")
    return lambda: attend_cached(q, q_shared, cache, w_uk, w_uv, SCALE, length)


def _expanded_call(batch: int, heads: int, cached: int) -> Callable[[], Tensor]:
    q, k = _normal(batch, heads, 1, NOPE + SHARED), _normal(batch, heads, cached, NOPE + SHARED)
    v = F.pad(_normal(batch, heads, cached, VALUE), (0, SHARED))
    return lambda: F.scaled_dot_product_attention(q, k, v, scale=SCALE)


def decode_cases() -> Iterator[GraphCase]:
    """A step at each of `DECODE_SHAPES`, and of sequences of very different lengths."""
    for batch, heads, cached in DECODE_SHAPES:
        traffic = 2.0 * batch * cached * (LATENT + SHARED)
        expanded = 4.0 * batch * heads * cached * (NOPE + SHARED)

        def make(
            shape: tuple[int, int, int] = (batch, heads, cached), size: float = traffic, theirs: float = expanded
        ) -> tuple[Calls, Calls]:
            peers = [_expanded_call(*shape) for _ in range(2)] if 2 * theirs < PEER_BYTES else []
            return [decode_call(*shape) for _ in range(sets(size))], peers

        yield GraphCase(
            name=f"mla_decode_B{batch}_H{heads}_S{cached}",
            shape=f"B={batch} H={heads} S={cached} latent {LATENT}+{SHARED} bf16",
            make=make, peer="torch attention on expanded keys and values", bytes=traffic,
            flops=2.0 * batch * heads * cached * (2 * LATENT + SHARED),
        )  # fmt: skip
    for heads in (12, 48):
        traffic = 2.0 * sum(RAGGED) * (LATENT + SHARED)

        def ragged(heads: int = heads, size: float = traffic) -> tuple[Calls, Calls]:
            return [decode_call(len(RAGGED), heads, max(RAGGED), RAGGED) for _ in range(sets(size))], []

        yield GraphCase(
            name=f"mla_decode_ragged_H{heads}",
            shape=f"B={len(RAGGED)} H={heads} S={min(RAGGED)}..{max(RAGGED)} latent {LATENT}+{SHARED} bf16",
            make=ragged, bytes=traffic, flops=2.0 * heads * sum(RAGGED) * (2 * LATENT + SHARED),
        )  # fmt: skip


def _training_pair(
    documents: int, tokens: int, heads: int, widths: tuple[int, int], backward: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    key, value = widths
    q, k, v = (_normal(1, documents * tokens, heads, d).requires_grad_() for d in (key, key, value))
    dout = torch.randn(1, documents * tokens, heads, value, device="cuda")
    segments = None
    if documents > 1:
        bounds = torch.arange(0, documents * tokens + 1, tokens, dtype=torch.int32, device="cuda")
        segments = Segments(bounds, 1, documents * tokens)

    def timed(function: Callable[[], Tensor]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.set_grad_enabled(backward):
                out = function()
                return torch.autograd.grad(out, (q, k, v), dout.to(out.dtype)) if backward else out

        return run

    def peer() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = (x.view(documents, tokens, heads, -1).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=key**-0.5)
            return out.transpose(1, 2).reshape(1, documents * tokens, heads, value)

    return timed(lambda: attend(q, k, v, key**-0.5, segments)), timed(peer)


def training_cases() -> Iterator[Case]:
    """Forward, and forward with backward."""
    for documents, tokens, heads, (key, value) in TRAINING_SHAPES:
        forward = float(documents) * float(tokens) ** 2 * heads * (key + value)
        length = f"{documents}x{tokens}" if documents > 1 else str(tokens)
        for name, backward, flops in (("fwd", False, forward), ("fwdbwd", True, 3.5 * forward)):
            yield Case(
                name=f"mla_attend_{name}_T{length}_H{heads}",
                shape=f"T={length} H={heads} keys {key} values {value}, causal, fp32 output",
                make=lambda shape=(documents, tokens, heads, (key, value), backward): _training_pair(*shape),
                peer="cuDNN attention through torch, bf16 output",
                flops=flops,
                dtype=torch.bfloat16,
            )


def cases() -> Iterator[GraphCase | Case]:
    """Decode, then training."""
    yield from decode_cases()
    yield from training_cases()
