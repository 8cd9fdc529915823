"""Prefill passes of a serving engine on a GPU: as they are, recorded as a CUDA graph, and the sum of their kernels.

`python perilune/bench/gpu_prefill.py [PRESET]` prints a line for each size, with what a recording costs to make.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import torch

from perilune.bench.engine_driver import model_of
from perilune.serve.cache import Chunk
from perilune.serve.runner import ModelRunner, PagePool, pool_geometry
from perilune.serve.runner.runner import Scores
from perilune.serve.schedule import Row

CASES = ((40, 0), (500, 0), (8000, 0), (1000, 7000), (2000, 0), (64, 4000), (4096, 0))  # new tokens, and before them


def timed(run, times: int) -> float:
    """Milliseconds of a call, of a queue of so many."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / times


def kernels_of(run) -> tuple[float, int]:
    """Milliseconds and number of the kernels of a call, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return sum(event.device_time for event in events) / 1e3, len(events)


def measure(preset: str) -> None:
    """Print the lines."""
    model = model_of(preset, "cuda")
    geometry = pool_geometry(model.cfg, torch.bfloat16, device=model.device)
    pool = PagePool(model.cfg, geometry, 64, torch.bfloat16, model.device)
    pool.bytes_PR.zero_()
    runner = ModelRunner(model, pool, model.cfg.vocab_size)
    passes = runner.prefill_graphs
    assert passes is not None, "prefill passes of this model are not recorded"
    for tokens, before in CASES:
        sequence = SimpleNamespace(
            name="s", ids=[n % 1000 for n in range(before + tokens)], content=None, prompt=before + tokens
        )
        state = tuple(range(60, 60 + geometry.groups))
        pages = list(range(geometry.pages_for(before + tokens)))
        row = Row(sequence, Chunk("r", 0, before, before + tokens, pages, state, (), ()), True)

        def run(row: Row = row) -> None:
            runner.prefill([row], Scores())

        with torch.inference_mode():
            runner.prefill_graphs = None
            run()
            as_it_is, (kernel_ms, count) = timed(run, 3), kernels_of(run)
            runner.prefill_graphs = passes
            room = passes.room_for([row.chunk])
            assert room is not None
            began = time.perf_counter()
            passes.ready(room)
            recording = 1e3 * (time.perf_counter() - began)
            whole, replay = timed(run, 5), timed(passes.graph(room).replay, 5)
            began = time.perf_counter()
            run()
            host = 1e3 * (time.perf_counter() - began)
            padded_ms, padded = kernels_of(run)
        print(
            f"{tokens:5d} tokens behind {before:5d}: as it is {as_it_is:6.2f} ms, its {count} kernels {kernel_ms:6.2f}; room of "
            f"{room.tokens} and {room.pages} pages: {whole:6.2f} ms, replay {replay:6.2f}, its {padded} kernels {padded_ms:6.2f}, "
            f"host {host:.2f}; recorded in {recording:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        measure(sys.argv[1] if len(sys.argv) > 1 else "mini")
