"""Rows of KDA decode and verify on a GPU, next to the traffic of the states at copy speed.

Beside the rate of a large copy, of which the bound is made, a row's `extra` has `equal_copy_ms`: what a copy takes that reads and
writes as many bytes, measured in the same way. Short ones never reach the rate of large ones.

The peer, where fla-core can be imported, is its `fused_recurrent_kda` with gate, norms and sigmoid in the kernel: the
recurrence alone, without the convolution, the output norm and the output gate that ours includes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.bench.graphs import Calls, GraphCase, graph_times, sets
from perilune.bench.harness import Row
from perilune.ops.choice import force
from perilune.ops.kda import kda_decode_step
from perilune.ops.kda.verify import Projections, kda_verify_step

SIZE, TAPS, LOWER_BOUND = 128, 4, -5.0
SHAPES = ((1, 12), (1, 96), (16, 96), (64, 96), (256, 96))  # B, H
VERIFY_SHAPES = ((1, 96), (32, 96))
DRAFTS = 8


@dataclass(frozen=True, kw_only=True)
class StatesCase(GraphCase):
    """A row of which also a copy of as many bytes is timed."""

    def measure(self, device: str, samples: int) -> Row:
        """As `GraphCase.measure`, with `equal_copy_ms` in the row's `extra`."""
        row = super().measure(device, samples)
        torch.cuda.empty_cache()
        # Whole pages: of a number of bytes that 4096 does not divide, a copy took 1.3 to 1.5 times as long.
        size = -(-int(self.bytes) // 2 // 4096) * 4096
        pairs = [[torch.empty(size, device=device, dtype=torch.uint8) for _ in "ab"] for _ in range(sets(self.bytes))]
        copies = [lambda a=a, b=b: b.copy_(a) for a, b in pairs]
        return replace(row, extra=row.extra | {"equal_copy_ms": statistics.median(graph_times(copies))})


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _weights(batch: int, heads: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    channels = 3 * heads * SIZE
    first = _normal(channels, TAPS, dtype=torch.float32), _normal(batch, channels, TAPS - 1)
    return first, (_normal(heads, dtype=torch.float32) / 8, _normal(heads * SIZE, dtype=torch.float32))


def _numbers(heads: int) -> dict:
    return {
        "num_heads": heads, "key_dim": SIZE, "lower_bound": LOWER_BOUND, "scale": SIZE**-0.5, "norm_eps": 1e-5,
    }  # fmt: skip


def _decode(batch: int, heads: int) -> Callable[[], Tensor]:
    (conv, window), (A_log, bias) = _weights(batch, heads)
    qkv, decay = _normal(batch, 3 * heads * SIZE), _normal(batch, heads, SIZE)
    beta, gate, weight = _normal(batch, heads), _normal(batch, heads, SIZE), _normal(SIZE, dtype=torch.float32)
    state = _normal(batch, heads, SIZE, SIZE, dtype=torch.float32)
    return lambda: kda_decode_step(qkv, conv, window, decay, A_log, bias, beta, gate, weight, state, **_numbers(heads))


def _peer(batch: int, heads: int) -> Callable[[], object] | None:
    with suppress(ImportError):
        from fla.ops.kda import fused_recurrent_kda

        q, k, v, g = (_normal(batch, 1, heads, SIZE) for _ in range(4))
        state = _normal(batch, heads, SIZE, SIZE, dtype=torch.float32)
        arguments = {
            "q": q, "k": k, "v": v, "g": g, "beta": _normal(batch, 1, heads), "initial_state": state,
            "A_log": _normal(heads, dtype=torch.float32) / 8, "dt_bias": _normal(heads * SIZE, dtype=torch.float32),
            "output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "lower_bound": LOWER_BOUND,
        }  # fmt: skip
        return lambda: fused_recurrent_kda(**arguments)
    return None


def _verify(batch: int, heads: int, accepted: int) -> Callable[[], Tensor]:
    (conv, window), (A_log, bias) = _weights(batch, heads)

    def projections() -> Projections:
        shape = batch, DRAFTS + 1
        return Projections(_normal(*shape, 3 * heads * SIZE), _normal(*shape, heads, SIZE), _normal(*shape, heads))

    new, pending, gate = projections(), projections(), _normal(batch, DRAFTS + 1, heads, SIZE)
    counts = torch.full((batch,), accepted, device="cuda", dtype=torch.int32)
    weight, state = _normal(SIZE, dtype=torch.float32), _normal(batch, heads, SIZE, SIZE, dtype=torch.float32)
    return lambda: kda_verify_step(
        new, gate, pending, counts, conv, window, A_log, bias, weight, state, **_numbers(heads)
    )


def decode_bytes(batch: int, heads: int) -> float:
    """Least traffic of a decode step in bfloat16: the state both ways, the window both ways, inputs, gate and output; of each head
    its parameters once."""
    states, window, rows = 2 * 4 * SIZE * SIZE, 2 * 2 * 3 * SIZE * (TAPS - 1), 2 * (6 * SIZE + 1)
    return batch * heads * (states + window + rows) + 4.0 * (heads * (SIZE * (3 * TAPS + 1) + 1) + SIZE)


def verify_bytes(batch: int, heads: int, accepted: int) -> float:
    """Least traffic of a verify step in bfloat16: the state both ways, the window both ways, k, v and decay of the folded
    tokens and q of those that the convolution still sees, inputs, gates and outputs of the new ones."""
    folded = accepted * 3 * SIZE + min(accepted, TAPS - 1) * SIZE
    scored = (DRAFTS + 1) * (3 + 1 + 1 + 1) * SIZE
    states = 4 * SIZE * SIZE * (2 if accepted else 1)
    return batch * heads * (states + 2 * (folded + scored + 2 * 3 * SIZE * (TAPS - 1)))


def cases() -> Iterator[StatesCase]:
    """Decode steps of the CUDA kernel, verify steps, decode steps of Triton's kernel."""
    yield from _decode_cases("cuda", "")
    for batch, heads in VERIFY_SHAPES:
        for accepted in (0, DRAFTS // 2, DRAFTS):
            traffic = verify_bytes(batch, heads, accepted)
            passes = traffic / (4.0 * batch * heads * SIZE * SIZE)

            def make(
                batch: int = batch, heads: int = heads, m: int = accepted, size: float = traffic
            ) -> tuple[Calls, Calls]:
                return [_verify(batch, heads, m) for _ in range(sets(size))], []

            yield StatesCase(
                name=f"kda_verify_B{batch}_H{heads}_m{accepted}",
                shape=f"B={batch} H={heads} d={SIZE}, {accepted} of {DRAFTS} folded, {DRAFTS + 1} scored, {passes:.2f} state passes",
                make=make, bytes=traffic,
            )  # fmt: skip
    yield from _decode_cases("triton", "_triton")


def _decode_cases(implementation: str, suffix: str) -> Iterator[StatesCase]:
    for batch, heads in SHAPES:
        traffic = decode_bytes(batch, heads)

        def make(batch: int = batch, heads: int = heads, size: float = traffic) -> tuple[Calls, Calls]:
            count = sets(size)
            peers = [peer for peer in (_peer(batch, heads) for _ in range(count)) if peer is not None]
            return [_forced(implementation, _decode(batch, heads)) for _ in range(count)], peers

        yield StatesCase(
            name=f"kda_decode_B{batch}_H{heads}{suffix}", shape=f"B={batch} H={heads} d={SIZE}, fp32 state, whole step",
            make=make, peer="fla-core, recurrence alone", bytes=traffic,
        )  # fmt: skip


def _forced(implementation: str, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with force(implementation):
            return call()

    return run
