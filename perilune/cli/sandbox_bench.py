"""`perilune sandbox bench`: times, memory and overcommit of the drivers that work here, beside the report's figures."""

from __future__ import annotations

import json
import signal
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

    Rows go to stderr as they are known, with what is being done; the results file and, at the end, stdout have them as JSON.

    Attributes:
        driver: which ones; empty = all whose probe passes.
        runs: samples of each row.
        clones: of one sandbox, for the memory rows; 0 = none.
        disk: folder on a disk for the synced rows; empty = the system's folder for temporary files.
        budget: seconds for all of it; what is slow gets fewer samples, what does not fit is left out and named; 0 = no limit.
        results: .jsonl file to append to; empty = none.
        json: one JSON object on stdout.
    """

    driver: tuple[str, ...] = ()
    runs: int = 30
    clones: int = 24
    disk: Path | None = None
    budget: float = 300.0
    results: Path | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the command; returns the exit code."""
    flags = parse_flags(
        SandboxBenchFlags, args, SandboxBenchFlags(), prog="perilune sandbox bench", description=__doc__ or ""
    )
    # Told to end, it ends its guests and still gives the rows that it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from perilune.bench import sandbox

    notes: list[str] = []

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def on_note(text: str) -> None:
        notes.append(text)
        tell(text)

    found: list[Row] = []
    try:
        for row in sandbox.run(
            flags.driver, flags.runs, flags.clones, flags.disk, results=flags.results,
            budget_seconds=flags.budget or None, on_note=on_note,
        ):  # fmt: skip
            found.append(row)
            tell(_line(row, flags.runs))
    finally:
        if flags.json:
            left_out = [note for note in notes if "left out" in note]
            print(
                json.dumps(
                    {"rows": [asdict(row) for row in found], "conditions": sandbox.conditions(), "left_out": left_out}
                )
            )
        else:
            for side, text in sandbox.conditions().items():
                print(f"{side}: {text}")
            print(f"{len(found)} rows" + (f"; appended to {flags.results}" if flags.results else ""))
    return 0 if found else 1


def _line(row: Row, runs: int) -> str:
    if "overcommit" in row.extra:
        extra = row.extra
        return (
            f"{row.name:<44} {extra['overcommit']:>9.1f} x   {extra['promised_bytes'] / 2**20:.0f} MiB promised, "
            f"{(extra['pss_bytes'] + extra['files_bytes']) / 2**20:.0f} held; report: up to {extra['report_overcommit']} x in real workloads"
        )
    text = f"{row.name:<44} {row.ours_ms:>9.2f} ms   p95 {row.extra['p95_ms']:.2f}"
    if row.samples < runs:
        text += f"   of {row.samples} samples"
    if row.peer_ms is not None:
        text += f"   {row.peer.partition(' (')[0]} {row.peer_ms:g} ms"
    if "store_bytes" in row.extra:
        text += (
            f"   afterwards {row.extra['held_bytes']:.0f} bytes held; store {row.extra['store_bytes'] / 2**20:.0f} MiB"
        )
    return text
