"""Rows of short GPU kernels: timed by replaying CUDA graphs, since launches from Python would take longer than they do.

A graph calls the operation once for each of several sets of inputs, which together are larger than the L2 cache, so that
no set is still there when its turn comes again.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from perilune.bench.harness import Row, bound_ms, commit, device_name, versions, work_done

CACHE_BYTES = 400e6  # of inputs that one replay walks through
SAMPLES = 20
DIRECT_CALLS = 3

Calls = Sequence[Callable[[], object]]


def graph_times(calls: Calls, samples: int = SAMPLES) -> list[float]:
    """Milliseconds a call, for each of `samples` replays of a graph that makes all calls once."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return _times(graph.replay, len(calls), samples)


def direct_times(call: Callable[[], object], samples: int = SAMPLES) -> list[float]:
    """The same for a call that no graph can hold, because it waits for the device."""

    def several() -> None:
        for _ in range(DIRECT_CALLS):
            call()

    several()
    return _times(several, DIRECT_CALLS, samples)


def _times(run: Callable[[], object], calls: int, samples: int) -> list[float]:
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return times


def sets(bytes_of_one: float) -> int:
    """How many sets of inputs a replay walks through."""
    return max(2, min(24, int(CACHE_BYTES / bytes_of_one) + 1))


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    """One row to measure; as `harness.Case`, but for the calls.

    Attributes:
        name, shape, peer, flops, bytes, dtype: see `harness.Case`.
        make: builds the inputs and returns the calls, one for each set of inputs: `(ours, the peer's)`, the latter empty
            where there is no peer.
        peer_waits: the peer waits for the device, so its calls are made one by one.
    """

    name: str
    shape: str
    make: Callable[[], tuple[Calls, Calls]]
    peer: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    peer_waits: bool = False

    def measure(self, device: str, samples: int) -> Row:
        """Time ours and, if there is one, the peer; `samples` is what slower rows want and is not used."""
        gc.collect()  # inputs of the last row
        torch.cuda.empty_cache()
        ours, peers = self.make()
        mine = graph_times(ours)
        others = None
        if peers:
            others = direct_times(peers[0]) if self.peer_waits else graph_times(peers)
        median, peer_median = statistics.median(mine), None if others is None else statistics.median(others)
        return Row(
            name=self.name, shape=self.shape, ours_ms=median, peer=self.peer if peers else "", peer_ms=peer_median,
            ratio=None if peer_median is None else peer_median / median, bound_ms=bound_ms(self, device),
            device=device_name(device), versions=versions(), commit=commit(), ours_spread_ms=(min(mine), max(mine)),
            peer_spread_ms=None if others is None else (min(others), max(others)), samples=len(mine),
            extra=work_done(self, device),
        )  # fmt: skip
