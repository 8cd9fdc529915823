"""Rows of `perilune bench formats`: converting a checkpoint of K3's widths, against a plain copy of the same bytes.

Two KDA and two MLA layers in the released widths, with fewer experts and a smaller vocabulary so that it fits a disk. Each
conversion runs in a process of its own, which reports its time without start-up and the peak of its resident memory; the
peer, also in a process of its own, loads every file of the result with the safetensors library and saves it again, synced as
ours are. Both begin with files that are not in memory. Ours also hashes what it reads of a run and all that it writes. `extra.peak_over_shard` is our peak divided by the largest file that was written: below 1 the conversion never held
one shard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench import harness
from perilune.bench.harness import Row
from perilune.config import ModelConfig
from perilune.config.presets import k3
from perilune.config.published import PublishedConfig, publish
from perilune.errors import CapacityError, ConfigError
from perilune.loading import convert
from perilune.loading.documents import finish_published
from perilune.model.hf import published_files
from perilune.model.hf.shard_file import PIECE, write_shard
from perilune.shapes.tensors import checkpoint_tensors

EXPERTS, VOCABULARY = 8, 16384
PEER = "safetensors load_file, save_file and fsync of the same files"
# name, the folder it reads, the one it makes, options
CONVERSIONS = (
    ("import_bf16", "published", "native", {}),
    ("export_bf16", "native", "published_again", {}),
    ("export_mxfp4", "native", "packed", {"experts": "mxfp4"}),
    ("import_mxfp4", "packed", "native_again", {}),
)


def shape_of(experts: int, widths: ModelConfig | None = None) -> ModelConfig:
    """K3 with the layers kda, mla, kda, mla, `experts` experts and a smaller vocabulary, without vision."""
    cfg = widths or k3()
    if experts < 2:
        raise ConfigError(f"--experts {experts} must be at least 2")
    moe = replace(cfg.moe, num_experts=experts, experts_per_token=min(cfg.moe.experts_per_token, experts - 1))
    vocabulary = min(cfg.vocab_size, VOCABULARY)
    return replace(
        cfg, num_layers=4, global_every=2, attn_res_block_layers=2, vocab_size=vocabulary, vision=None, moe=moe
    )


class RandomSource:
    """Random bf16 and fp32 tensors of a model, made while they are read."""

    def __init__(self, cfg: ModelConfig) -> None:
        self.published: PublishedConfig = publish(cfg, experts="bf16")
        self.notes: list[str] = []
        self.side_files: dict[str, Path] = {}
        self._specs = {spec.name: spec for spec in checkpoint_tensors(cfg, packed_experts=False)}
        self._noise = torch.randn(PIECE, generator=torch.Generator().manual_seed(0)).mul_(0.02)

    def dtype(self, name: str) -> str:
        """See `Source`."""
        return self._specs[name].dtype

    def pieces(self, name: str) -> Iterator[Tensor]:
        """See `Source`; the same noise for all pieces, because what is converted does not change how fast."""
        left = self._specs[name].elements
        while left:
            yield self._noise[: min(left, PIECE)]
            left -= min(left, PIECE)

    def codes(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Not asked for: the source is written with bf16 experts."""
        raise NotImplementedError(name)

    def kept_scale(self, name: str) -> Tensor | None:
        """See `Source`."""
        return None

    def identity(self) -> list[tuple[str, int, int]]:
        """See `Source`."""
        return []


def write_random(folder: Path, cfg: ModelConfig) -> int:
    """Write a published checkpoint with bf16 experts; returns its bytes."""
    source, done = RandomSource(cfg), {}
    folder.mkdir(parents=True)
    files = published_files(source, "bf16")
    for file in files:
        done[file.name] = write_shard(folder / file.name, file.tensors)
    finish_published(source, folder, files, done, "bf16")
    return sum(entry["bytes"] for entry in done.values())


def peak_bytes() -> int:
    """Largest resident memory that this process has had."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def _forget(folder: Path) -> None:
    """Ask the system to drop its copy of the weights in memory, so that both sides read them from the disk."""
    if hasattr(os, "posix_fadvise"):
        for path in _weights(folder):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def work(order: dict[str, Any]) -> dict[str, Any]:
    """What a child process does: one conversion, or the peer's copy."""
    _forget(Path(order["source"]))
    began = time.perf_counter()
    if order["what"] == "convert":
        convert(order["source"], order["out"], **order["options"])
    else:
        from safetensors.torch import load_file, save_file

        out = Path(order["out"])
        out.mkdir()
        for path in _weights(Path(order["source"])):
            save_file(load_file(path), out / path.name)
            with (out / path.name).open("rb") as file:
                os.fsync(file.fileno())
    return {"seconds": time.perf_counter() - began, "peak_bytes": peak_bytes()}


def _child(**order: Any) -> dict[str, Any]:
    order = {key: str(value) if isinstance(value, Path) else value for key, value in order.items()}
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(order)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CapacityError(f"the measured process failed: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _row(name: str, shape: str, root: Path, source: str, out: str, options: dict[str, Any], device: str) -> Row:
    ours = _child(what="convert", source=root / source, out=root / out, options=options)
    peer = _child(what="copy", source=root / out, out=root / "copy")
    _remove(root / "copy")
    sizes = [path.stat().st_size for path in _weights(root / out)]
    read = sum(path.stat().st_size for path in _weights(root / source))
    milliseconds = [1e3 * ours["seconds"], 1e3 * peer["seconds"]]
    return Row(
        name=f"formats_{name}", shape=shape, ours_ms=milliseconds[0], peer=PEER, peer_ms=milliseconds[1],
        ratio=milliseconds[1] / milliseconds[0], bound_ms=1e3 * (read + sum(sizes)) / harness.copy_ceiling(device),
        device=harness.device_name(device), versions=harness.versions(), commit=harness.commit(),
        ours_spread_ms=(milliseconds[0],) * 2, peer_spread_ms=(milliseconds[1],) * 2, samples=1,
        extra={
            "peak_bytes": ours["peak_bytes"], "largest_shard_bytes": max(sizes), "bytes_read": read, "bytes_written": sum(sizes),
            "peak_over_shard": ours["peak_bytes"] / max(sizes), "peer_peak_bytes": peer["peak_bytes"],
        },
    )  # fmt: skip


def run(
    device: str = "cpu",
    budget_seconds: float | None = None,
    experts: int = EXPERTS,
    *,
    widths: ModelConfig | None = None,
    results: Path | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the rows once each; see `bench.kernels.run`.

    Args:
        device: "cpu"; conversions do not use another one.
        budget_seconds: no row is begun after this many seconds.
        experts: routed experts of a layer; eight of K3's width make a checkpoint of about 8 GB.
        widths: another model's widths than K3's.
        results: a .jsonl file to continue from and to append to.
        folder: where the checkpoints are made and removed again; None = the system's temporary folder.
        on_row: called with each row as it is ready.

    Raises:
        ConfigError: another device, or too few experts.
        CapacityError: not enough disk space.
    """
    if device != "cpu":
        raise ConfigError(f"bench formats converts on the CPU; device {device!r} has no rows, use cpu")
    import shutil

    cfg = shape_of(experts, widths)
    shape = f"2 KDA + 2 MLA layers of width {cfg.hidden_size}, {experts} experts"
    start, known, rows = time.monotonic(), harness.known(results, device), []
    need = 4 * sum(spec.nbytes for spec in checkpoint_tensors(cfg, packed_experts=False))
    with tempfile.TemporaryDirectory(prefix="perilune-formats-", dir=folder) as place:
        root = Path(place)
        missing = [name for name, *_ in CONVERSIONS if (f"formats_{name}", shape) not in known]
        late = budget_seconds is not None and budget_seconds <= 0
        if missing and not late:
            free = shutil.disk_usage(root).free
            if need > free:
                raise CapacityError(
                    f"bench formats needs {need:,} bytes in {root}, there are {free:,}; use fewer --experts"
                )
            write_random(root / "published", cfg)
        for name, source, out, options in CONVERSIONS:
            row = known.get((f"formats_{name}", shape))
            if row is None:
                if late or (budget_seconds is not None and time.monotonic() - start >= budget_seconds):
                    break
                for before in CONVERSIONS:  # what an earlier call measured is made again, unmeasured
                    if before[2] == source and not (root / source).exists():
                        convert(root / before[1], root / before[2], **before[3])
                row = _row(name, shape, root, source, out, options, device)
                if results is not None:
                    harness.append(results, row)
            rows.append(row)
            if on_row is not None:
                on_row(row)
            needed_later = {later[1] for later in CONVERSIONS[[c[0] for c in CONVERSIONS].index(name) + 1 :]}
            for done in {source, out} - needed_later:
                _remove(root / done)
    return rows


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))
