"""`perilune demo --vision`: train a small K3 on text and drawn pictures from step 0, and ask about pictures it never saw."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perilune.cli.demo import DemoFlags, demo_config, finish, open_trainer, say
from perilune.cli.picture_lines import exam_line
from perilune.cli.train import own_name
from perilune.rundir import RunDir

PICTURES = 200
"""Pictures of each part that are asked about."""


def run_vision(flags: DemoFlags) -> int:
    """The demo with pictures; returns the exit code."""
    began = time.perf_counter()
    config = demo_config(flags)
    say("1/4 text, tokenizer, and pictures that this machine draws itself")
    trainer = open_trainer(flags, config)
    say("2/4 train on both from the first step")
    summary = trainer.fit()
    if not summary.finished:
        say("stopped and saved; the same command goes on")
        return 130
    run_dir = trainer.run
    result: dict[str, Any] = asdict(summary)
    result["train"]["images"] = sum(record.get("images", 0) for record in run_dir.read_metrics("train"))
    run_dir.write_json("summary.json", result)
    say("3/4 questions about pictures that were never seen")
    from perilune.eval.picture_samples import write_samples
    from perilune.eval.vision import examine, table

    exams = examine(trainer.model, trainer.data.tokenizer, config, pictures=PICTURES)
    samples = write_samples(exams, run_dir.path)
    result["vision"] = {"pictures": PICTURES, **table(exams), "samples": samples}
    run_dir.write_json("summary.json", result)
    say("4/4 report")
    return finish(flags, run_dir, result, began, _print)


def _print(result: dict[str, Any], path: Path) -> None:
    train, vision = result["train"], result["vision"]
    ended = "all steps" if train["token_budget_reached"] else f"the time limit after {train['steps']} steps"
    print(f"trained      {train['tokens']:,} tokens with {train['images']:,} pictures in {train['seconds']:.0f} s, "
          f"{train['tokens_per_second']:,.0f} tokens/s ({ended})")  # fmt: skip
    print(f"text         {train['val_bits_per_byte']:.3f} bits/byte on held-out text")
    for part, words in (("held_out", "new pictures"), ("unseen", "new pairs")):
        for about in ("shape", "colour", "what"):
            print(exam_line(words, vision[part][about]))
    print(f"report       {result['report']}")
    again, picture = own_name(RunDir(path)), shlex.quote(str(path / vision["samples"][0]["file"]))
    print(f'next         perilune chat --run {again} --image {picture} --once "what is this?"')
