"""`perilune sandbox bench`: it measures what works here and says what it left out; no time is judged."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

from perilune.bench import sandbox as bench
from perilune.errors import ConfigError

TESTED_DRIVERS = ("proc",)


def test_rows_of_a_driver_at_both_places(driver, tmp_path):
    if driver not in ("proc", "docker"):
        pytest.skip("a machine's template takes seconds to boot; proc shows the rows")
    command = [sys.executable, "-m", "perilune", "sandbox", "bench", "--driver", driver, "--runs", "1", "--clones", "2", "--json", "--budget", "100",
               "--disk", str(tmp_path), "--results", str(tmp_path / "rows.jsonl")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = {row["name"]: row for row in told["rows"]}
    steps = (
        "create_exec",
        "checkpoint_64KiB",
        "checkpoint_10MiB",
        "fork",
        "fork_exec",
        "pause",
        "resume",
        "resume_exec",
        "warm_create",
    )
    for place in [place.name for place in bench.places(tmp_path)]:
        for step in steps:
            row = found[f"sandbox_{driver}_{step}_{place}"]
            assert row["ours_ms"] > 0 and row["extra"]["p95_ms"] >= row["ours_ms"], row
        assert found[f"sandbox_{driver}_pause_{place}"]["extra"]["store_bytes"] > 0
        assert found[f"sandbox_{driver}_resume_{place}"]["peer_ms"] == 49.0
    idle = next(row for name, row in found.items() if "overcommit_idle" in name)
    assert idle["extra"]["clones"] == 2 and idle["extra"]["overcommit"] > 1
    assert (
        len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(found)
        and "real workloads" in told["conditions"]["report"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_budget_that_is_over_leaves_steps_out_and_names_them(driver, tmp_path):
    notes: list[str] = []
    assert list(bench.run((driver,), 2, 2, tmp_path, budget_seconds=1e-9, on_note=notes.append)) == []
    left_out = [note for note in notes if "left out: life, checkpoint_64KiB" in note]
    assert len(left_out) == len(bench.places(tmp_path)) and "clones" in left_out[0] and "clones" not in left_out[-1]


def test_a_share_of_the_time_ends_a_step_not_before_its_least(monkeypatch, tmp_path):
    """A clock that runs ten seconds ahead with each look: every step ends early, with the samples that it must have."""
    ticks = itertools.count(0, 10)
    taken: list[str] = []

    def step(of):
        while True:
            taken.append(of.driver)
            yield

    monkeypatch.setattr(bench, "STEPS", {"life": step, "fork": step})
    place = bench.Place(name="here", folder=tmp_path, sync="none")
    clock = bench.Clock(100.0, lambda note: None, now=lambda: float(next(ticks)))
    assert len(list(bench.measured("proc", place, 30, 0, clock))) == 1 and len(taken) == bench.LEAST


def test_percentiles_are_samples():
    values = [float(number) for number in range(1, 31)]
    assert (
        bench.percentile(values, 0.95) == 29.0
        and bench.percentile([7.0], 0.95) == 7.0
        and bench.percentile(values, 1.0) == 30.0
    )


def test_mistakes_are_told(tmp_path):
    with pytest.raises(ConfigError, match="is not one of"):
        bench.run(("teleport",), 1, 0, None)
    with pytest.raises(ConfigError, match="runs=0"):
        bench.run((), 0, 0, None)
    with pytest.raises(ConfigError, match="is not a folder"):
        bench.places(tmp_path / "none")
