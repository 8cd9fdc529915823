"""`perilune ablate`: vary mechanisms at equal training FLOPs and tabulate what each does to the loss."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perilune.config import EvalConfig, TrainConfig
from perilune.config.parse import parse_flags
from perilune.config.presets import training
from perilune.errors import ConfigError
from perilune.eval.factors import K3_FORM, Variant, plan, values_of
from perilune.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class AblateFlags:
    """Every variant spends the same training FLOPs: cheaper ones take more steps.

    Attributes:
        vary: what to vary. `residual=plain,full,block` compares the values of one factor (the first is the point of
            comparison); `residual,ffn,mixer` sets each factor to K3's form, one at a time and all together, against the
            unchanged base. Factors: residual, mixer, ffn, balancer, activation, latent, optimizer.
        preset: training preset to start from.
        base: the same as --preset; reads better with a baseline such as k2_nano.
        seeds: runs of each variant.
        steps: optimizer steps of the base; the variants' follow from their FLOPs.
        data: files, directories or globs; empty = the default corpus.
        run: name or path of the parent folder; an interrupted ablation continues there.
        json: one JSON object on stdout.
    """

    vary: tuple[str, ...] = ()
    preset: str = "nano"
    base: str | None = None
    seeds: int = 3
    steps: int = 150
    data: tuple[str, ...] = ()
    run: Path | None = None
    json: bool = False


def parse_vary(words: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """`("residual=plain,full", "ffn,mixer")` → `[("residual", ("plain", "full")), ("ffn", ()), ("mixer", ())]`.

    Raises:
        ConfigError: unknown factor or value, one that is named twice, or a single value (nothing to compare).
    """
    vary: list[tuple[str, tuple[str, ...]]] = []
    for word in words:
        factor, equals, listed = word.partition("=")
        if not equals:
            names = [name for name in word.split(",") if name]
            for name in names:
                values_of(name)
            vary += [(name, ()) for name in names]
            continue
        values = tuple(value for value in listed.split(",") if value)
        unknown = [value for value in values if value not in values_of(factor)]
        if unknown:
            raise ConfigError(
                f"unknown values {unknown} of the factor {factor}; allowed: {', '.join(values_of(factor))}"
            )
        if len(values) < 2:
            raise ConfigError(f"--vary {word} gives {len(values)} value; give two or more to compare, e.g. "
                              f"{factor}={','.join(values_of(factor)[:2])}, or just {factor} for K3's {K3_FORM[factor]}")  # fmt: skip
        if len(set(values)) < len(values):
            raise ConfigError(f"--vary {word} names a value twice; each is trained once")
        vary.append((factor, values))
    names = [factor for factor, _ in vary]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--vary names the factor {twice[0]} more than once; give all its values at one place")
    return vary


def _base(flags: AblateFlags) -> TrainConfig:
    if flags.seeds < 1 or flags.steps < 1:
        raise ConfigError(f"--seeds {flags.seeds} and --steps {flags.steps} must be at least 1")
    base = training(flags.base or flags.preset)
    data = replace(base.data, path=flags.data or base.data.path)
    return replace(base, steps=flags.steps, data=data, eval=EvalConfig(final_tokens=65536))


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(AblateFlags, args, AblateFlags(), prog="perilune ablate", description=__doc__ or "")
    vary = parse_vary(flags.vary)
    variants = plan(_base(flags), vary)
    name = f"ablate-{flags.base or flags.preset}-{'-'.join(factor for factor, _ in vary)}"
    folder = flags.run or Path(name)
    folder = folder if len(folder.parts) > 1 else Path("runs") / folder
    if RunDir(folder).exists():
        raise ConfigError(f"{folder} is a run, not the parent folder of an ablation; choose another --run")

    from rich.console import Console

    from perilune.eval.ablate import run_ablation

    console = Console(stderr=True)
    cells = len(variants) * flags.seeds
    console.print(f"{len(variants)} variants × {flags.seeds} seeds in {folder}; equal training FLOPs")
    done = 0

    def announce(label: str, seed: int, trainer) -> None:
        nonlocal done
        done += 1
        console.print(f"[{done}/{cells}] {label}, seed {seed}: {trainer.config.steps} steps")

    rows = run_ablation(variants, flags.seeds, folder, on_trainer=announce)
    if rows is None:
        console.print("stopped and saved; the same command continues")
        return 130
    if flags.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "seeds": flags.seeds, "folder": str(folder)}))
        return 0
    _print(rows, variants, flags.seeds)
    print(
        f"\ntable: {folder / 'ablation.json'}\nnext: perilune report {shlex.quote(str(folder))}/* --compare",
        file=sys.stderr,
    )
    return 0


def _print(rows, variants: list[Variant], seeds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"held-out bits per byte at equal training FLOPs, {seeds} seeds (± = 95 % interval of the mean)"
    )
    for column in (
        "variant",
        "parameters",
        "active",
        "MFLOPs/token",
        "steps",
        "bits per byte",
        "difference",
        "busiest expert",
    ):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        spread = "" if row.interval is None else f" ± {row.interval:.3f}"
        difference = "–"
        if row.difference is not None:
            difference = f"{row.difference:+.3f}"
            if row.difference_interval is not None:
                difference += f" ± {row.difference_interval:.3f}" + ("" if row.settled else "  (not settled)")
        table.add_row(
            row.label, f"{row.parameters:,}", f"{row.active:,}", f"{row.train_flops_per_token / 1e6:.2f}", str(row.steps),
            f"{row.mean:.3f}{spread}", difference, "–" if row.routing is None else f"{row.routing:.2f}× mean",
        )  # fmt: skip
    console = Console()
    # Piped into a file there is no width to respect, and a squeezed table cannot be read.
    (console if console.is_terminal else Console(width=150)).print(table)
    print(f"difference is to {variants[0].label}, paired by seed; below zero is better")
