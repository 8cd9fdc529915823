"""environment.json: on what, with what and how a run ran."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from perilune import __version__
from perilune.train.precision import Precision


def describe(
    device: torch.device, precision: Precision, threads: int, peak: float, why_not_recorded: str | None
) -> dict[str, Any]:
    """Versions, machine, device, dtype with its reason, threads, measured matrix-product peak in FLOP/s, and whether the
    training steps are recorded as CUDA graphs (None = no reason against it) or why not."""
    return {
        "perilune": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "device_type": device.type,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "precision": str(precision.dtype).removeprefix("torch."),
        "precision_reason": precision.reason,
        "matmul_peak_flops": peak,
        "cuda_graphs": why_not_recorded or "training steps are recorded",
        "ops": os.environ.get("PERILUNE_OPS", "each op chooses; see `perilune doctor --ops`"),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
