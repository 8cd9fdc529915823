"""`perilune eval`: bits per byte of a run on all of its held-out text, and right answers about new pictures."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import NoReturn

from perilune.cli.picture_lines import exam_line
from perilune.errors import ConfigError
from perilune.rundir import RunDir

HELP = """usage: perilune eval --run NAME [options]

Bits per byte of a run on the text that it never saw: every held-out byte counts, and context is carried on.

  --run NAME|PATH    the run; a bare name lives under runs/
  --step N           which checkpoint (default: the newest whole one)
  --tokens N         score about this many tokens; 0 = all (default)
  --pictures N       ask about N new pictures of every kind, too; a run that was trained on pictures (default: 0)
  --device D         auto | cpu | cuda (default: as trained)
  --json             one JSON object on stdout
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"eval: {message}; see perilune eval --help")


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = _Parser(prog="perilune eval", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--run")
    parser.add_argument("--step", type=int)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(args)
    if flags.help:
        print(HELP, end="")
        return 0
    if not flags.run:
        raise ConfigError("eval: --run NAME is needed: which run is to be scored?")
    if flags.tokens < 0:
        raise ConfigError(f"--tokens {flags.tokens} must be 0 (all) or more")
    if flags.pictures < 0:
        raise ConfigError(f"--pictures {flags.pictures} must be 0 (none) or more")
    from perilune.eval.heldout import evaluate_run
    from perilune.eval.vision import examine_run
    from perilune.loading.run import newest_step

    run = RunDir.resolve(flags.run)
    # One checkpoint for both, also while the run goes on and writes others.
    step = flags.step if flags.step is not None or not run.exists() else newest_step(run)
    exams = None
    if flags.pictures:  # first: a run without pictures is refused before minutes of scoring
        exams = examine_run(flags.run, step=step, pictures=flags.pictures, device=flags.device)
    result = evaluate_run(flags.run, step=step, max_tokens=flags.tokens, device=flags.device)
    folder = run.path
    if flags.json:
        told = {"run": str(folder), "step": step, "bits_per_byte": result.bits_per_byte, "nats": result.nats,
                "bytes": result.bytes, "tokens": result.tokens, "documents": result.documents,
                "seconds": result.seconds}  # fmt: skip
        print(json.dumps(told if exams is None else told | {"pictures": exams}))
        return 0
    print(
        f"{folder}: {result.bits_per_byte:.4f} bits/byte on {result.bytes:,} held-out bytes "
        f"({result.documents} document{'s' * (result.documents != 1)}, {result.tokens:,} tokens, {result.seconds:.1f} s)"
    )
    for part, questions in (exams or {}).items():
        for exam in questions.values():
            print(exam_line({"held_out": "new pictures", "unseen": "new pairs"}[part], exam))
    print(f"next: perilune report {shlex.quote(flags.run)}")
    return 0
