"""Small things on their way to the device and back, without waiting for what the device is doing.

A plain copy from or to the memory of the host waits until the device has done all it was given before. Through pinned memory
it is one more entry in the device's queue; torch keeps such memory until the copy has been made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers (nested lists, an array, a tensor of the host) as a tensor on a device, which may be written to it later."""
    here = torch.as_tensor(values, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


class Readback:
    """Copies of tensors for the host, made when the device has computed them.

    Args:
        tensors: on one device. On a CPU they are there already, and are not copied.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._there, self._event = list(tensors), None
        if self._there and self._there[0].is_cuda:
            self._there = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
            ]
            self._event = torch.cuda.Event(blocking=True)  # whoever waits leaves the core to others
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The copies, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._there


class Stopwatch:
    """How long a device works on what is launched between the making and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            self._events[0].record()
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        """What was launched until now counts."""
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        """Once the device has come to the stop."""
        if self._events is None:
            return self._ended - self._began
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3
