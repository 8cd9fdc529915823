"""Read what a run left in its folder, as numpy arrays; nothing is trained, loaded or recomputed.

A run may be young, stopped half-way or written by another version, so every file but `config.toml` or `metrics.jsonl`
may be missing or damaged: what cannot be read becomes a note that the page shows in its place.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perilune.errors import CheckpointError, ConfigError, RequestError
from perilune.rundir import RunDir

_STEP = re.compile(r"step-(\d+)\.npz$")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The model's inside at one step: arrays as `rundir` documents them, each `None` if the run has no such part."""

    step: int
    arrays: dict[str, np.ndarray]

    def get(self, name: str) -> np.ndarray | None:
        """The array `name`, or None where it is missing or empty."""
        value = self.arrays.get(name)
        return None if value is None or value.size == 0 else value


@dataclass(kw_only=True)
class Run:
    """Everything the report knows about a run.

    Attributes:
        config: the resolved configuration as nested dictionaries; empty if unreadable.
        train, evals, samples: records of metrics.jsonl by kind, in order of step.
        probes: by step, oldest first.
        unbalanced: training records of the same model without load balancing (the demo trains one beside its run).
        notes: what is missing or damaged, one sentence each.
    """

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    train: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    unbalanced: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def column(self, key: str, records: Sequence[dict[str, Any]] | None = None) -> np.ndarray:
        """One value a record as float64, NaN where a record lacks it; training records unless told otherwise."""
        return np.array(
            [_number(record.get(key)) for record in (self.train if records is None else records)], dtype=float
        )

    def setting(self, path: str, default: Any = None) -> Any:
        """A setting by its dotted name, `default` if it is not there."""
        return dig(self.config, path, default)


def dig(tree: Any, path: str, default: Any = None) -> Any:
    """Follow a dotted path through nested dictionaries; `default` where it ends early or the value is null."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return default
        tree = tree[key]
    return default if tree is None else tree


def _number(value: Any) -> float:
    """A float; NaN for null, text, lists and missing values."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")


def collect(name_or_path: str | Path) -> Run:
    """Read the run folder `name_or_path` (a bare name lives under `runs/`).

    Raises:
        RequestError: there is no run in that folder.
    """
    folder = RunDir.resolve(name_or_path)
    if not (folder.path / "config.toml").is_file() and not (folder.path / "metrics.jsonl").is_file():
        where = "is not a folder" if not folder.path.is_dir() else "has neither config.toml nor metrics.jsonl"
        known = sorted(path.parent.name for path in folder.path.parent.glob("*/config.toml"))
        hint = f"runs there: {', '.join(known[:12])}" if known else "`perilune train --run NAME` makes one"
        raise RequestError(f"no run in {folder.path}: it {where}; give a run's name or folder; {hint}")
    run = Run(name=folder.name, path=folder.path)
    _read_config(folder, run)
    for name in ("environment", "summary", "split"):
        setattr(run, name, _read_json(folder, f"{name}.json", run.notes))
    records = [record for record in folder.read_metrics() if isinstance(record.get("step"), int)]
    for kind, target in (("train", run.train), ("eval", run.evals), ("sample", run.samples)):
        target.extend(_last_of_each_step([record for record in records if record.get("kind") == kind], kind))
    if not run.train:
        run.notes.append("metrics.jsonl holds no training step yet.")
    losses = run.column("loss")
    if run.train and not np.isfinite(losses).all():
        first = run.train[int(np.argmin(np.isfinite(losses)))]["step"]
        run.notes.append(f"The loss was not finite from step {first}; curves leave those points out.")
    if not run.summary:
        run.notes.append("There is no summary.json: the run has not finished, or was stopped before its end.")
    run.unbalanced = RunDir(folder.path / "without_balancing").read_metrics("train")
    _read_probes(folder, run)
    return run


def _read_config(folder: RunDir, run: Run) -> None:
    path = folder.path / "config.toml"
    try:
        from perilune.config.parse import load_toml

        run.config_text = path.read_text(encoding="utf-8", errors="replace")
        run.config = load_toml(path)
    except (OSError, ConfigError) as error:
        run.notes.append(f"config.toml cannot be read: {error}")


def _read_json(folder: RunDir, name: str, notes: list[str]) -> dict[str, Any]:
    if not (folder.path / name).exists():
        return {}
    try:
        value = folder.read_json(name)
    except CheckpointError as error:
        notes.append(f"{name} cannot be read: {error}")
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _last_of_each_step(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """A resumed run may log a step twice; the later record counts. Samples keep one record a prompt."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        kept[(record["step"], json.dumps(record.get("prompt"))) if kind == "sample" else (record["step"],)] = record
    return sorted(kept.values(), key=lambda record: record["step"])


def _read_probes(folder: RunDir, run: Run) -> None:
    for path in sorted((folder.path / "probes").glob("step-*.npz")):
        match = _STEP.search(path.name)
        if match is None:
            continue
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
            run.notes.append(f"probes/{path.name} cannot be read ({type(error).__name__}); it is left out.")
            continue
        run.probes.append(Probe(step=int(match[1]), arrays=arrays))
    run.probes.sort(key=lambda probe: probe.step)
    if not run.probes:
        run.notes.append(
            "There are no probes, so the pictures of the model's inside are missing; `train --probe-every N` writes them."
        )
