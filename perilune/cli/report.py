"""`perilune report RUN…`: one self-contained page about a run, or about several side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from perilune.config.parse import parse_flags
from perilune.report import build, expand, images


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """What `perilune report` writes.

    Attributes:
        runs: names of runs under runs/, or folders of a run or of several runs, which are put side by side.
        out: file to write; without it report.html in the run's folder, runs/comparison.html for several.
        compare: only the side-by-side part, without each run's own sections.
        png: also write the main pictures of every run as PNG files into this folder.
        json: one JSON object on stdout.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN …")] = ()
    out: Path | None = None
    compare: bool = False
    png: Path | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(ReportFlags, args, ReportFlags(), prog="perilune report", description=__doc__ or "")
    path = build(flags.runs, flags.out, compare=flags.compare)
    pictures: list[Path] = []
    if flags.png is not None:
        folders, _ = expand(flags.runs)
        for name in folders:
            pictures += images(name, flags.png if len(folders) == 1 else flags.png / Path(name).name)
    if flags.json:
        print(
            json.dumps(
                {"report": str(path), "bytes": path.stat().st_size, "images": [str(picture) for picture in pictures]}
            )
        )
        return 0
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB, opens without a network)")
    for picture in pictures:
        print(picture)
    return 0
