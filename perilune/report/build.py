"""Build a report: read run folders, write one page, write images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perilune.errors import RequestError
from perilune.report import figures
from perilune.report.collect import Run, collect
from perilune.report.html import Page, render
from perilune.report.image import write_png
from perilune.report.page import comparison_page, run_page
from perilune.rundir import RunDir, write_atomic

IMAGES = {
    "loss": figures.loss,
    "bits-per-byte": figures.bits_per_byte,
    "routing-balance": figures.routing_balance,
    "routing-load": figures.routing_load,
    "attnres-weights": figures.attnres,
    "kda-half-lives": figures.half_lives,
    "throughput": figures.throughput,
}


def build(runs: Sequence[str | Path], out: str | Path | None = None, *, compare: bool = False) -> Path:
    """Write one self-contained HTML page about one or several runs; return where it is.

    Args:
        runs: names under `runs/`, or folders: of a run, or one that holds runs (an ablation). Several runs are put side
            by side, and each one's own sections follow. Files among several arguments (a shell's `*`) are left out.
        out: file to write; None = `report.html` in the run's folder, or `runs/comparison.html` for several.
        compare: only the side-by-side part.

    Raises:
        RequestError: a folder is no run, `compare` has fewer than two runs, `out` cannot be written, or the extra
            `report` is not installed.
    """
    if not runs:
        raise RequestError("no run was named; give the name of a run under runs/, or its folder")
    folders, skipped = expand(runs)
    if compare and len(folders) < 2:
        raise RequestError(f"--compare was given {len(folders)} run; name at least two, or leave --compare out")
    read = [collect(run) for run in folders]
    read[0].notes += [f"{path} is not a run folder and was left out." for path in skipped]
    page = run_page(read[0]) if len(read) == 1 else comparison_page(read, details=not compare)
    default = read[0].path / "report.html" if len(read) == 1 else read[0].path.parent / "comparison.html"
    return write_page(page, Path(out) if out is not None else default)


def expand(runs: Sequence[str | Path]) -> tuple[list[str | Path], list[Path]]:
    """Return the run folders that are meant, and files that were left out."""
    meant: list[str | Path] = []
    skipped: list[Path] = []
    for given in runs:
        folder = RunDir.resolve(given).path
        inside = [path.parent for path in sorted(folder.glob("*/config.toml"))]
        if len(runs) > 1 and Path(given).is_file():
            skipped.append(Path(given))
        elif inside and not (folder / "config.toml").exists():
            meant += inside
        else:
            meant.append(given)
    if not meant:
        raise RequestError(
            f"no run among {', '.join(str(run) for run in runs)}; give names of runs under runs/, or their folders"
        )
    return meant, skipped


def write_page(page: Page, path: Path) -> Path:
    """Write a page to `path`, whole or not at all; return `path`.

    Raises:
        RequestError: `path` cannot be written, or the extra `report` is not installed.
    """
    if path.is_dir():
        raise RequestError(f"{path} is a folder; give the name of a file, for example {path / 'report.html'}")
    text = render(page)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode("utf-8"))
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; choose another place") from error
    return path


def images(run: str | Path, folder: str | Path) -> list[Path]:
    """Write the run's main pictures as PNG files into `folder`; return those written (parts the run lacks are left out).

    Raises:
        RequestError: no run there, or matplotlib is not installed.
    """
    found: Run = collect(run)
    written = []
    for name, draw in IMAGES.items():
        chart = draw(found)
        if chart is not None:
            written.append(write_png(chart, Path(folder) / f"{name}.png"))
    return written
