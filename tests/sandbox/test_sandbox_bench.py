"""`perilune sandbox bench`: it measures what works here and says what it left out; no time is judged."""

from __future__ import annotations

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
    command = [sys.executable, "-m", "perilune", "sandbox", "bench", "--driver", driver, "--runs", "2", "--clones", "2", "--json",
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
