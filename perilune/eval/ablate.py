"""Run an ablation: every variant with every seed, at equal training FLOPs, and compare with honest spread.

Each run is an ordinary run folder under one parent, so an interrupted ablation continues where it stopped, and each
variant can be reported, sampled or chatted with like any other run.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perilune.config import TrainConfig
from perilune.errors import CheckpointError
from perilune.eval.factors import Variant, mean_train_flops
from perilune.rundir import RunDir
from perilune.shapes.counts import count_parameters
from perilune.train.resume import check_same
from perilune.train.run_data import absolute
from perilune.train.trainer import Trainer, finished

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; the last one serves for all larger ones.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95 % interval (Student's t); None for fewer than two values."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, None
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, T_95[min(n - 1, len(T_95)) - 1] * deviation / math.sqrt(n)


@dataclass(frozen=True)
class Row:
    """One variant in the table.

    Attributes:
        label: factor and value.
        parameters, active: of the model.
        train_flops_per_token: averaged over the curriculum.
        steps: that spend the base's FLOPs.
        bits_per_byte: on the held-out text, one a seed.
        mean: of the seeds.
        interval: half-width of the mean's 95 % interval; None with one seed.
        difference: mean over seeds of (this − first variant), paired by seed; None for the first.
        difference_interval: half-width of its 95 % interval.
        routing: pooled load of the busiest expert over the mean, worst layer, mean over seeds; None without experts.
    """

    label: str
    parameters: int
    active: int
    train_flops_per_token: float
    steps: int
    bits_per_byte: list[float]
    mean: float
    interval: float | None
    difference: float | None
    difference_interval: float | None
    routing: float | None

    @property
    def settled(self) -> bool:
        """True if the interval of the difference excludes zero."""
        return (
            self.difference is not None
            and self.difference_interval is not None
            and abs(self.difference) > self.difference_interval
        )


def folder_name(label: str, seed: int) -> str:
    """Run folder of a variant and seed."""
    return f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}-seed{seed}"


def _run_one(config: TrainConfig, run: RunDir, on_trainer: Callable[[Trainer], None]) -> dict[str, Any]:
    """Train one cell, resuming or skipping what an earlier call did; returns its summary.

    Raises:
        ConfigError: the folder holds this cell of another ablation: other steps, data or model.
    """
    if run.exists():
        check_same(run.read_config(), absolute(config))
        if finished(run, config):
            return run.read_json("summary.json")
        try:
            trainer = Trainer.from_config(None, run, resume=True)
        except CheckpointError:  # stopped before its first checkpoint: nothing to keep
            shutil.rmtree(run.path)
            trainer = Trainer.from_config(config, run)
    else:
        trainer = Trainer.from_config(config, run)
    on_trainer(trainer)
    return asdict(trainer.fit())


def run_ablation(
    variants: Sequence[Variant], seeds: int, folder: Path, *, on_trainer: Callable[[str, int, Trainer], None]
) -> list[Row] | None:
    """Train all cells and return the table's rows, first variant first.

    Args:
        variants: from `factors.plan`.
        seeds: runs of each variant, with seeds 0, 1, …; a seed fixes weights and data order alike.
        folder: parent of the run folders; the table is written there as ablation.json.
        on_trainer: called with label, seed and trainer before each run starts (progress).

    Returns:
        None if a run was interrupted.

    Raises:
        ConfigError: the folder holds runs of another ablation.
    """
    results: list[list[dict[str, Any]]] = []
    for variant in variants:
        of_variant = []
        for seed in range(seeds):
            config = replace(variant.config, seed=seed)
            run = RunDir(folder / folder_name(variant.label, seed))
            label = variant.label
            summary = _run_one(config, run, lambda trainer, label=label, seed=seed: on_trainer(label, seed, trainer))
            if not summary["finished"]:
                return None
            of_variant.append(summary)
        results.append(of_variant)
    rows = table(variants, results)
    RunDir(folder).write_json("ablation.json", {"rows": [asdict(row) for row in rows], "seeds": seeds})
    return rows


def table(variants: Sequence[Variant], results: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """Rows of the comparison from the summaries of all runs, `results[variant][seed]`."""
    scores = [[s["train"]["val_bits_per_byte"] for s in of_variant] for of_variant in results]
    rows = []
    for index, variant in enumerate(variants):
        mean, interval = mean_and_interval(scores[index])
        difference = difference_interval = None
        if index:
            difference, difference_interval = mean_and_interval(
                [a - b for a, b in zip(scores[index], scores[0], strict=True)]
            )
        pooled = [s["routing"]["pooled_worst_layer"] for s in results[index]]
        count = count_parameters(variant.config.model)
        rows.append(
            Row(
                label=variant.label,
                parameters=count.text,
                active=count.active,
                train_flops_per_token=mean_train_flops(variant.config),
                steps=variant.config.steps,
                bits_per_byte=scores[index],
                mean=mean,
                interval=interval,
                difference=difference,
                difference_interval=difference_interval,
                routing=None if None in pooled else sum(pooled) / len(pooled),
            )  # fmt: skip
        )
    return rows
