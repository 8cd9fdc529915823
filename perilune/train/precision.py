"""Which dtype activations flow in, on which device, with how many threads, and why."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from perilune.config.train import TrainConfig
from perilune.errors import ConfigError


class Precision(NamedTuple):
    """Activation dtype and the reason it was taken; parameters are fp32 always."""

    dtype: torch.dtype
    reason: str


def resolve_device(device: str) -> torch.device:
    """The device that the setting `auto | cpu | cuda` means here.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device; use device=cpu or auto")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def cpu_bf16_feature() -> str | None:
    """Name of the CPU's bf16 matrix or dot-product instructions, or None if it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no such file on macOS, whose CPUs with bf16 torch does not use
        return None
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    names = ("bf16",) if platform.machine() in ("aarch64", "arm64") else ("amx_bf16", "avx512_bf16")
    return next((name for name in names if name in flags), None)


def resolve_precision(precision: str, device: torch.device) -> Precision:
    """Activation dtype for the setting `auto | fp32 | bf16` on `device`."""
    if precision == "fp32":
        return Precision(torch.float32, "asked for")
    if precision == "bf16":
        return Precision(torch.bfloat16, "asked for")
    if device.type == "cuda":
        return Precision(torch.bfloat16, "the GPU multiplies bf16 fast")
    feature = cpu_bf16_feature()
    if feature is None:
        return Precision(torch.float32, "this CPU has no bf16 instructions (avx512_bf16, amx_bf16)")
    return Precision(torch.bfloat16, f"this CPU has {feature}")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(config: TrainConfig) -> int:
    """Set torch's CPU threads: as asked, else as OMP_NUM_THREADS says, else one for each core this process may use."""
    threads = config.threads
    if threads == 0 and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        threads = int(os.environ["OMP_NUM_THREADS"])
    if threads == 0:
        threads = usable_cores()
    torch.set_num_threads(max(1, threads))
    return torch.get_num_threads()
