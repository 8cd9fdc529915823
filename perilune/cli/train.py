"""`perilune train`: pre-train a model into a run folder, or go on with a run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from perilune.config.parse import from_dict, load_toml, merge, parse_flags, to_dict
from perilune.config.presets import TRAINABLE, training
from perilune.config.train import TrainConfig
from perilune.errors import ConfigError
from perilune.rundir import RunDir

HELP = f"""usage: perilune train [--preset NAME | --config FILE] [--run NAME] [options]

Pre-train a model on text. The run folder holds its configuration, metrics, checkpoints and summary.

  --preset NAME           model, batch and schedule to start from: {", ".join(TRAINABLE)} (default: nano)
  --config FILE           TOML settings over the preset, or a whole run's config.toml
  --run NAME|PATH         run folder; a bare name lives under runs/ (default: preset and time)
  --resume                go on with --run from its last whole checkpoint; nothing to do if it is finished
  --data PATH …           files, folders or globs to train on (default: Python's standard library)
  --steps N               optimizer steps
  --time-limit SECONDS    stop and save after this much training; 0 = never
  --checkpoint.every N    steps between checkpoints; 0 = only at the end and on Ctrl-C
  --precision P           auto | fp32 | bf16
  --seed N                of weights, data order and samples
  --json                  print the summary as one JSON object on stdout
  --help-all              every setting, such as --optim.lr-muon or --model.residual
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"train: {message}; see perilune train --help")


def _own_flags(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags of the verb itself; the rest are settings of `TrainConfig`."""
    parser = _Parser(prog="perilune train", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--help-all", action="store_true")
    parser.add_argument("--preset")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--run")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--data", nargs="+")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(args)


def resolve(own: argparse.Namespace, rest: list[str], base: TrainConfig | None = None) -> TrainConfig:
    """The configuration: preset, then file, then flags.

    Args:
        own: flags of the verb.
        rest: settings as flags.
        base: what to start from when neither a preset nor a file is named; None = the preset nano.

    Raises:
        ConfigError: an unknown or ill-typed setting, or one that contradicts another.
    """
    table: dict[str, Any] = load_toml(own.config) if own.config else {}
    preset = own.preset or table.pop("preset", None)
    table.pop("preset", None)
    if preset is None and "model" in table:
        config = from_dict(TrainConfig, table)
    elif preset is None and base is not None:
        config = from_dict(TrainConfig, merge(to_dict(base), table))
    else:
        config = from_dict(TrainConfig, merge(to_dict(training(preset or "nano")), table))
    if own.data:
        rest = ["--data.path", *own.data, *rest]
    return parse_flags(TrainConfig, rest, config, prog="perilune train", description=__doc__ or "")


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code: 0 done, 130 interrupted and saved."""
    own, rest = _own_flags(args)
    if own.help:
        print(HELP, end="")
        return 0
    if own.help_all:
        resolve(own, ["--help"])
        return 0
    if own.resume and not own.run:
        raise ConfigError("--resume needs --run NAME: which run is to go on?")
    default = f"{own.preset or 'nano'}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunDir.resolve(default if own.run is None else own.run)
    if own.resume:
        old = folder.read_config()
        config = resolve(own, rest, old) if rest or own.data or own.config or own.preset else None
        done = _if_finished(folder, config or old, own.json)
        if done:
            return 0
    else:
        config = resolve(own, rest)
    return _train(config, folder, resume=own.resume, as_json=own.json)


def _if_finished(folder: RunDir, config: TrainConfig, as_json: bool) -> bool:
    from perilune.train.resume import check_same
    from perilune.train.run_data import absolute
    from perilune.train.trainer import finished

    check_same(folder.read_config(), absolute(config))
    if not finished(folder, config):
        return False
    print(f"{folder.path} is finished; nothing to do", file=sys.stderr)
    if as_json:
        print(json.dumps(folder.read_json("summary.json") | {"run": str(folder.path)}))
    return True


def _train(config: TrainConfig | None, folder: RunDir, *, resume: bool, as_json: bool) -> int:
    from perilune.cli.progress import ProgressLine
    from perilune.train.trainer import Trainer

    trainer = Trainer.from_config(config, folder, resume=resume, callbacks=[ProgressLine()])
    summary = trainer.fit()
    again = own_name(folder)
    if as_json:
        print(json.dumps(asdict(summary) | {"run": str(folder.path)}))
    else:
        _print(summary.train, summary.routing, folder)
    if not summary.finished:
        print(
            f"stopped after step {summary.train['steps']} and saved; go on with: perilune train --run {again} --resume",
            file=sys.stderr,
        )
        return 130
    if summary.stopped_by == "time_limit":
        print(
            f"the time limit ended the run; go on with: perilune train --run {again} --resume --time-limit 0",
            file=sys.stderr,
        )
    if not as_json:
        print(f"next: perilune generate --run {again} --prompt 'def '")
    return 0


def own_name(folder: RunDir) -> str:
    """What to type in a shell for this run."""
    return shlex.quote(folder.path.name if folder.path.parent == Path("runs") else str(folder.path))


def _print(train: dict[str, Any], routing: dict[str, Any], folder: RunDir) -> None:
    print(f"run         {folder.path}")
    if train["steps"]:
        print(f"trained     {train['steps']:,} steps, {train['tokens']:,} tokens in {train['seconds']:.1f} s "
              f"({train['tokens_per_second']:,.0f} tokens/s)")  # fmt: skip
        print(f"loss        {train['loss_first']:.3f} → {train['loss_last']:.3f} nats/token")
    if train["val_bits_per_byte"] is not None:
        print(f"held-out    {train['val_bits_per_byte']:.4f} bits/byte")
    if routing["max_over_mean"] is not None:
        print(f"routing     largest expert {routing['max_over_mean']:.2f} × mean a step, "
              f"{routing['pooled_worst_layer']:.2f} × pooled in the worst layer")  # fmt: skip
