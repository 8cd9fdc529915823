"""Rows of KDA decode and verify on a GPU: microseconds a step, next to the traffic of the states at copy speed.

    python -m perilune.bench.gpu_decode [RESULTS.jsonl]

A step is captured in a CUDA graph over several sets of inputs, together larger than the cache, and the graph is replayed:
launches from Python would take longer than the kernels. The peer, where fla-core can be imported, is its
`fused_recurrent_kda` with gate, norms and sigmoid in the kernel: the recurrence alone, without the convolution, the output
norm and the output gate that ours includes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from perilune.bench.harness import Row, append, commit, copy_ceiling, device_name, versions
from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda import kda_decode_step
from perilune.ops.kda.verify import Projections, kda_verify_step

SIZE, TAPS, LOWER_BOUND = 128, 4, -5.0
SHAPES = ((1, 12), (1, 96), (16, 96), (64, 96), (256, 96))  # B, H
VERIFY_SHAPES = ((1, 96), (32, 96))
DRAFTS = 8
CACHE_BYTES = 400e6  # of inputs that one replay walks through, so that none is still in the cache
SAMPLES = 20


def graph_times(calls: Sequence[Callable[[], object]], samples: int = SAMPLES) -> list[float]:
    """Milliseconds a call, for each of `samples` replays of a graph that makes all calls once."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return times


def make_row(
    name: str, shape: str, ours: Sequence[Callable], bytes_moved: float, peer: str = "", theirs: Sequence[Callable] = ()
) -> Row:
    """Time ours and, if there is one, the peer."""
    mine = graph_times(ours)
    others = graph_times(theirs) if theirs else None
    median, peer_median = statistics.median(mine), None if others is None else statistics.median(others)
    return Row(
        name=name, shape=shape, ours_ms=median, peer=peer, peer_ms=peer_median,
        ratio=None if peer_median is None else peer_median / median, bound_ms=1e3 * bytes_moved / copy_ceiling("cuda"),
        device=device_name("cuda"), versions=versions(), commit=commit(), ours_spread_ms=(min(mine), max(mine)),
        peer_spread_ms=None if others is None else (min(others), max(others)), samples=len(mine),
    )  # fmt: skip


def sets(bytes_of_one: float) -> int:
    """How many sets of inputs a replay walks through."""
    return max(2, min(24, int(CACHE_BYTES / bytes_of_one) + 1))


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


def verify_bytes(batch: int, heads: int, accepted: int) -> float:
    """Least traffic of a verify step in bfloat16: the state both ways, the window both ways, k, v and decay of the folded
    tokens and q of those that the convolution still sees, inputs, gates and outputs of the new ones."""
    folded = accepted * 3 * SIZE + min(accepted, TAPS - 1) * SIZE
    scored = (DRAFTS + 1) * (3 + 1 + 1 + 1) * SIZE
    states = 4 * SIZE * SIZE * (2 if accepted else 1)
    return batch * heads * (states + 2 * (folded + scored + 2 * 3 * SIZE * (TAPS - 1)))


def run(results: Path | None = None) -> list[Row]:
    """Measure all rows, those of a decode step for the CUDA kernel and for Triton's; print them and append them to `results`.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("these rows need a CUDA device; torch sees none")
    rows = []
    for row in itertools.chain(_decode_rows("cuda", ""), _verify_rows(), _decode_rows("triton", "_triton")):
        report(row, results)
        rows.append(row)
    return rows


def _decode_rows(implementation: str, suffix: str) -> Iterator[Row]:
    for batch, heads in SHAPES:
        state_bytes = 8.0 * batch * heads * SIZE * SIZE
        count = sets(state_bytes)
        peers = [peer for peer in (_peer(batch, heads) for _ in range(count)) if peer is not None]
        ours = [_decode(batch, heads) for _ in range(count)]
        shape = f"B={batch} H={heads} d={SIZE}, fp32 state, whole step"
        peer = "fla-core, recurrence alone" if peers else ""
        with force(implementation):
            yield make_row(f"kda_decode_B{batch}_H{heads}{suffix}", shape, ours, state_bytes, peer, peers)


def _verify_rows() -> Iterator[Row]:
    for batch, heads in VERIFY_SHAPES:
        for accepted in (0, DRAFTS // 2, DRAFTS):
            traffic = verify_bytes(batch, heads, accepted)
            passes = traffic / (4.0 * batch * heads * SIZE * SIZE)
            shape = f"B={batch} H={heads} d={SIZE}, {accepted} of {DRAFTS} folded, {DRAFTS + 1} scored, {passes:.2f} state passes"
            ours = [_verify(batch, heads, accepted) for _ in range(sets(traffic))]
            yield make_row(f"kda_verify_B{batch}_H{heads}_m{accepted}", shape, ours, traffic)


def report(row: Row, results: Path | None) -> None:
    """Print a row, and append it to the file."""
    share = "" if row.bound_ms is None else f", {row.bound_ms / row.ours_ms:.0%} of copy speed"
    peer = "" if row.peer_ms is None else f"; {row.peer}: {1e3 * row.peer_ms:.1f} us"
    print(f"{row.name}: {1e3 * row.ours_ms:.1f} us{share}{peer}", flush=True)
    if results is not None:
        append(results, row)


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
