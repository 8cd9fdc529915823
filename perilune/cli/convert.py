"""`perilune convert`: runs and published checkpoints, one into the other."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NoReturn

from perilune.errors import ConfigError

HELP = """usage: perilune convert IN OUT [options]

Write a run as a published checkpoint (config.json and safetensors under the names of Kimi K3 or Kimi-Linear), read a
published checkpoint into a run folder, or store a published checkpoint's experts in another form. IN is only read. An
interrupted conversion stays in OUT.partial; the same command goes on where it stopped.

  IN                 a run (name or folder), one of its checkpoint folders, or a published checkpoint's folder
  OUT                the folder to make
  --to FORM          kimi-k3 | kimi-linear | native (default: native from a published folder, else the model's family)
  --experts E        mxfp4 | bf16: how routed experts are stored (default: as IN stores them)
  --step N           of a run, which checkpoint (default: the newest whole one)
  --verify           check IN's SHA256SUMS before and read every written file again after
  --json             one JSON object on stdout
"""
PLAIN_EVERY = 10.0
"""Seconds between progress lines where stderr is not a terminal."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"convert: {message}; see perilune convert --help")


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = _Parser(prog="perilune convert", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("source", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--to")
    parser.add_argument("--experts")
    parser.add_argument("--step", type=int)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(args)
    if flags.help:
        print(HELP, end="")
        return 0
    if flags.source is None or flags.out is None:
        raise ConfigError("convert: IN and OUT are needed: what to read, and the folder to make")
    from perilune.loading import convert

    with _progress() as on_progress:
        done = convert(
            flags.source, flags.out, to=flags.to, experts=flags.experts, step=flags.step, verify=flags.verify,
            on_progress=on_progress,
        )  # fmt: skip
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    if flags.json:
        print(json.dumps(asdict(done)))
        return 0
    speed = done.bytes / max(done.seconds, 1e-9) / 1e6
    print(
        f"{done.out}: {done.to}, experts {done.experts}, {done.tensors:,} tensors in {done.files} files, {done.bytes:,} bytes "
        f"in {done.seconds:.1f} s ({speed:,.0f} MB/s)"
        + (f", {done.reused_files} files from before" if done.reused_files else "")
        + (", verified" if done.verified else "")
    )
    folder = "--run" if done.to == "native" else "--model"
    print(f'next: perilune generate {folder} {shlex.quote(done.out)} --prompt "…"')
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere a plain line now and then. All of it goes to stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def line(file: str, written: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_EVERY:
                last = time.monotonic()
                print(f"{written / total:.0%} of {total / 1e9:.2f} GB, {file}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(),
        TextColumn("eta"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def move(file: str, written: int, total: int) -> None:
            bar.update(task, completed=written, total=total, description=file)

        yield move
