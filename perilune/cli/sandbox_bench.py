"""`perilune sandbox bench`: times, memory and overcommit of the drivers that work here, beside the report's figures."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.config.parse import parse_flags

if TYPE_CHECKING:
    from perilune.bench.harness import Row


@dataclass(frozen=True, kw_only=True)
class SandboxBenchFlags:
    """perilune sandbox bench: medians and 95th percentiles of every step, snapshots on tmpfs and on a synced disk.

    Attributes:
        driver: which ones; empty = all whose probe passes.
        runs: lives of a sandbox for each driver and place.
        clones: of one sandbox, for the memory rows; 0 = none.
        disk: folder on a disk for the synced rows; empty = the system's folder for temporary files.
        budget: seconds after which no further driver or place is begun; 0 = all.
        results: .jsonl file to append to; empty = none.
        json: one JSON object on stdout.
    """

    driver: tuple[str, ...] = ()
    runs: int = 30
    clones: int = 24
    disk: Path | None = None
    budget: float = 0.0
    results: Path | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the command; returns the exit code."""
    flags = parse_flags(
        SandboxBenchFlags, args, SandboxBenchFlags(), prog="perilune sandbox bench", description=__doc__ or ""
    )
    from perilune.bench import sandbox

    rows = sandbox.run(
        flags.driver, flags.runs, flags.clones, flags.disk, results=flags.results, budget_seconds=flags.budget or None,
        on_row=lambda row: print(_line(row), file=sys.stderr, flush=True),
        on_note=lambda note: print(note, file=sys.stderr, flush=True),
    )  # fmt: skip
    if flags.json:
        conditions = {
            "ours": "small guests of this machine, one at a time; clones of one sandbox for the memory rows",
            "report": sandbox.REPORT_CONDITIONS + "; overcommit up to 6.5 in real workloads",
        }
        print(json.dumps({"rows": [asdict(row) for row in rows], "conditions": conditions}))
    else:
        print(f"{len(rows)} rows" + (f"; appended to {flags.results}" if flags.results else ""))
    return 0 if rows else 1


def _line(row: Row) -> str:
    if "overcommit" in row.extra:
        extra = row.extra
        return (
            f"{row.name:<44} {extra['overcommit']:>9.1f} x   {extra['promised_bytes'] / 2**20:.0f} MiB promised, "
            f"{(extra['pss_bytes'] + extra['files_bytes']) / 2**20:.0f} held; report: up to {extra['report_overcommit']} x in real workloads"
        )
    text = f"{row.name:<44} {row.ours_ms:>9.2f} ms   p95 {row.extra['p95_ms']:.2f}"
    if row.peer_ms is not None:
        text += f"   {row.peer.partition(' (')[0]} {row.peer_ms:g} ms"
    if "store_bytes" in row.extra:
        text += (
            f"   afterwards {row.extra['held_bytes']:.0f} bytes held; store {row.extra['store_bytes'] / 2**20:.0f} MiB"
        )
    return text
