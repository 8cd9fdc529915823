"""`perilune doctor`: what this machine has, and which implementation of each operation runs on it, and why."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from perilune import __version__
from perilune.cli.op_choices import op_choices
from perilune.config.parse import parse_flags

# Instruction sets that decide how fast training is here.
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """What `perilune doctor` tells. The first call on a machine compiles the native kernels, which takes seconds.

    Attributes:
        ops: also list which implementation of each operation runs, and why.
        json: one JSON object on stdout, operations included.
    """

    ops: bool = False
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(DoctorFlags, args, DoctorFlags(), prog="perilune doctor", description=__doc__ or "")
    facts = examine()
    if flags.json:
        print(json.dumps(facts))
    else:
        _print(facts, ops=flags.ops)
    return 0


def examine() -> dict[str, Any]:
    """Everything the verb tells: environment, cpu, memory, disk, devices, extras, native kernels, ops, training steps, advice."""
    facts: dict[str, Any] = {
        "environment": _environment(),
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _disk(),
        "devices": _devices(),
        "extras": _extras(),
        "native": _native(),
        "ops": op_choices(),
        "training_steps": _training_steps(),
    }
    facts["advice"] = _advice(facts)
    return facts


def _training_steps() -> list[dict[str, str]]:
    """For each device: how the steps of a training run are launched, and why."""
    import torch

    from perilune.train.recorded import how

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [{"device": device, "how": how(torch.device(device))} for device in devices]


def _environment() -> dict[str, Any]:
    import numpy
    import torch

    switches = ("PERILUNE_OPS", "PERILUNE_NATIVE", "PERILUNE_CACHE", "OMP_NUM_THREADS", "CC")
    return {
        "perilune": __version__,
        "perilune_path": str(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda_build": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "numpy": numpy.__version__,
        "variables": {name: os.environ[name] for name in switches if name in os.environ},
    }


def _cpu() -> dict[str, Any]:
    import torch

    name, flags = platform.processor() or platform.machine(), set()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if match := re.search(r"^model name\s*:\s*(.+)$", text, re.M):
        name = match[1].strip()
    for line in re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M):
        flags |= set(line.split())
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string") or name
        flags |= {"asimd"} if platform.machine() == "arm64" else set()
        flags |= {"bf16"} if _output("sysctl", "-n", "hw.optional.arm.FEAT_BF16") == "1" else set()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": name,
        "machine": platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": usable,
        "features": {feature: feature in flags for feature in _FEATURES},
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_in_hardware": bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _memory() -> dict[str, int | None]:
    """Bytes of memory: of the machine, available now, and the limit of this process's control group."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = limit = None
    try:
        text = Path("/proc/meminfo").read_text()
        available = int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        pass
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            value = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        limit = value if value < total else None
    return {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}


def _disk() -> dict[str, Any]:
    here = Path.cwd()
    return {
        "path": str(here),
        "free_bytes": shutil.disk_usage(here).free,
        "temporary_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = [{"device": "cpu", "used": True}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append({
            "device": f"cuda:{index}", "used": True, "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "total_bytes": total, "free_bytes": free, "multiprocessors": properties.multi_processor_count,
        })  # fmt: skip
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "used": False, "reason": "perilune runs on cpu and cuda"})
    return found


def _extras() -> dict[str, Any]:
    """For each extra: whether its packages are there, which are missing, and how to install it."""
    try:
        requirements = metadata.requires("perilune") or []
    except metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, Any]] = {}
    for requirement in requirements:
        match = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if match is None or extra is None:
            continue
        entry = extras.setdefault(
            extra[1], {"present": True, "packages": {}, "missing": [], "install": f"pip install 'perilune[{extra[1]}]'"}
        )
        name = match[1]
        if name == "perilune" or ("Linux" in requirement and platform.system() != "Linux"):
            continue
        try:
            entry["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            entry["missing"].append(name)
            entry["present"] = False
    return extras


def _native() -> dict[str, Any]:
    """Each C kernel file: available, or why not."""
    from perilune.ops.native import build

    reasons = {path.stem: build.unavailable_reason(path.stem) for path in sorted(build.SOURCE_FOLDER.glob("*.c"))}
    compiler = next(
        (
            found
            for name in (os.environ.get("CC") or "", "gcc", "cc", "clang")
            if name and (found := shutil.which(name.split()[0]))
        ),
        None,
    )
    return {
        "compiler": compiler,
        "kernels": {name: {"available": reason is None, "reason": reason} for name, reason in reasons.items()},
    }


def _advice(facts: dict[str, Any]) -> list[str]:
    """What to do about what is missing, one sentence each."""
    advice = []
    native, variables = facts["native"], facts["environment"]["variables"]
    if native["compiler"] is None:
        advice.append(
            "No C compiler was found, so slower torch code runs; install gcc (Debian: apt-get install gcc libc6-dev)."
        )
    elif any(not kernel["available"] for kernel in native["kernels"].values()) and "PERILUNE_NATIVE" not in variables:
        advice.append("Some native kernels could not be built; their reasons are listed above.")
    if "PERILUNE_OPS" in variables or "PERILUNE_NATIVE" in variables:
        advice.append(
            "PERILUNE_OPS or PERILUNE_NATIVE is set and overrides the choice of implementation; unset it to let each operation choose."
        )
    if facts["disk"]["free_bytes"] < 2e9:
        advice.append(
            f"Only {_size(facts['disk']['free_bytes'])} are free in {facts['disk']['path']}; checkpoints may not fit."
        )
    threads, cores = facts["environment"]["torch_threads"], facts["cpu"]["usable_cores"]
    if threads < cores and "OMP_NUM_THREADS" in variables:
        advice.append(
            f"OMP_NUM_THREADS={variables['OMP_NUM_THREADS']} leaves {cores - threads} of {cores} cores unused."
        )
    for extra, use in (("serve", "serve and chat --web"), ("report", "report and demo")):
        if extra in facts["extras"] and not facts["extras"][extra]["present"]:
            advice.append(f"`perilune {use}` need the extra {extra}: {facts['extras'][extra]['install']}")
    return advice


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _print(facts: dict[str, Any], *, ops: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    environment, cpu, memory = facts["environment"], facts["cpu"], facts["memory"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("perilune", f"{environment['perilune']}  {environment['perilune_path']}")
    table.add_row("python", f"{environment['python']}  {environment['executable']}")
    build = f"CUDA {environment['torch_cuda_build']}" if environment["torch_cuda_build"] else "CPU build"
    table.add_row("torch", f"{environment['torch']} ({build}), {environment['torch_threads']} threads")
    table.add_row("platform", environment["platform"])
    has = " ".join(name for name, present in cpu["features"].items() if present) or "no vector extension known"
    table.add_row("cpu", f"{cpu['name']}, {cpu['usable_cores']} of {cpu['logical_cores']} cores usable")
    table.add_row(
        "",
        f"{has}; bf16 products {'in hardware' if cpu['bf16_in_hardware'] else 'not in hardware (fp32 is as fast or faster)'}",
    )
    limit = f", limited to {_size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    table.add_row("memory", f"{_size(memory['available_bytes'])} free of {_size(memory['total_bytes'])}{limit}")
    table.add_row("disk", f"{_size(facts['disk']['free_bytes'])} free in {facts['disk']['path']}")
    for device in facts["devices"][1:]:
        free = (
            f"{_size(device['free_bytes'])} free of {_size(device['total_bytes'])}, capability {device['capability']}"
            if device["used"]
            else device["reason"]
        )
        table.add_row(device["device"], f"{device.get('name', '')} {free}".strip())
    if len(facts["devices"]) == 1:
        table.add_row("gpu", "none that torch can use")
    for name, value in environment["variables"].items():
        table.add_row(name, value)
    console.print(table)

    console.print("\n[bold]extras[/bold]")
    for name, extra in facts["extras"].items():
        state = (
            "[green]present[/green]"
            if extra["present"]
            else f"[yellow]missing {', '.join(extra['missing'])}[/yellow]  {extra['install']}".replace(
                "perilune[", r"perilune\["
            )
        )
        console.print(f"  {name:<8} {state}", highlight=False)
    if not facts["extras"]:
        console.print(
            "  unknown: perilune runs from a source tree that is not installed; pip install -e .", highlight=False
        )

    console.print(
        f"\n[bold]native kernels[/bold]  compiler {facts['native']['compiler'] or 'not found'}", highlight=False
    )
    for name, kernel in facts["native"]["kernels"].items():
        console.print(
            f"  {name:<12} {'[green]available[/green]' if kernel['available'] else '[yellow]unavailable[/yellow] ' + kernel['reason']}",
            highlight=False,
        )

    if ops:
        listing = Table(title="operations", title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in ("operation", "device", "activations", "runs", "because"):
            listing.add_column(heading, overflow="fold", no_wrap=heading != "because")
        for row in facts["ops"]:
            listing.add_row(row["op"], row["device"], row["dtype"], row["implementation"], row["reason"])
        console.print()
        console.print(listing)
        for row in facts["training_steps"]:
            console.print(f"training steps on {row['device']}: {row['how']}", highlight=False)
    else:
        counts: dict[str, int] = {}
        for row in facts["ops"]:
            counts[row["implementation"]] = counts.get(row["implementation"], 0) + 1
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        console.print(f"\n[bold]operations[/bold]  {told}; `perilune doctor --ops` says which and why", highlight=False)
    for sentence in facts["advice"]:
        console.print(f"[yellow]![/yellow] {sentence}".replace("perilune[", r"perilune\["), highlight=False)
