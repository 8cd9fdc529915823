"""Recording CUDA graphs, and what torch leaves behind when a recording breaks off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def warm_up(run: Callable[[], object], device: torch.device) -> None:
    """Execute `run` beside the current stream, in order with it: what compiles or allocates once does so before a recording."""
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)


def record_graph(run: Callable[[], Result], pool: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record what `run` launches, without executing it.

    If the recording cannot be ended, because something in it waited for the device, torch 2.11 leaves its side stream the
    current one and the device's generator waiting for a replay: the next kernel of whoever goes on would race with the last
    one, and the next random number would raise. Both are put back.

    Args:
        run: its kernels were compiled before.
        pool: memory shared with other recordings of which one runs at a time.
        device: with an index, or the current one.

    Returns:
        The graph, and what `run` returned: tensors that every replay writes.

    Raises:
        RuntimeError: something was launched that no graph can hold, or waited for the device.
    """
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    stream, drawn = torch.cuda.current_stream(device), generator.clone_state()
    try:
        # Another thread may call CUDA meanwhile, an encoder of images for instance.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return graph, run()
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(drawn)
        raise
