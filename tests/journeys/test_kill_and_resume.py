"""A run that is killed with SIGKILL at any moment and resumed ends with the same bytes as one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


def start(folder: Path, name: str, *more: str) -> subprocess.Popen:
    """`perilune train` in a process of its own; its output goes to a file beside the runs."""
    command = [sys.executable, "-m", "perilune", "train", "--preset", "tiny", "--data", str(folder / "text"), "--run", str(folder / name),
               "--steps", str(STEPS), "--checkpoint.every", "2", "--data.tokenizer", "byte", "--precision", "fp32", "--threads", "1", *more]  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PERILUNE_CACHE=str(folder / "cache"), PERILUNE_NATIVE="0")
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def finish(process: subprocess.Popen, folder: Path, name: str) -> None:
    assert process.wait() == 0, (folder / f"{name}.log").read_text()[-3000:]


def final_weights(run: Path) -> dict[str, bytes]:
    """Bytes of the weight files of the last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
    assert last.name == f"step-{STEPS:08d}", last
    return {path.name: path.read_bytes() for path in sorted(last.glob("model*.safetensors"))}


def kill_after(process: subprocess.Popen, metrics: Path, records: int, delay: float) -> bool:
    """Kill once `metrics` has that many records and `delay` seconds have passed; False if the run ended before."""
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < records:
        try:
            process.wait(timeout=0.02)
            return False
        except subprocess.TimeoutExpired:
            continue
    try:
        process.wait(timeout=delay)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "text").mkdir()
    draw = random.Random(7)
    for number in range(8):
        lines = [f"value_{draw.randrange(30)} = other_{draw.randrange(30)} + {draw.randrange(99)}" for _ in range(150)]
        (folder / "text" / f"part{number}.py").write_text("\n".join(lines) + "\n")
    finish(start(folder, "whole"), folder, "whole")
    return folder


@pytest.mark.soak
def test_killed_runs_end_with_the_same_bytes(undisturbed, count):
    """Each run is killed up to three times: at a random step, a random moment after it, saves included."""
    draw = random.Random(11)
    total = 0
    for attempt in range(count(full=25, reduced=1)):
        name, kills = f"killed{attempt}", 0
        process = start(undisturbed, name)
        for _ in range(attempt % 3 + 1):
            metrics = undisturbed / name / "metrics.jsonl"
            if not kill_after(process, metrics, draw.randrange(2, STEPS), draw.random() * 0.1):
                break
            kills += 1
            process = start(undisturbed, name, "--resume")
        finish(process, undisturbed, name)
        assert final_weights(undisturbed / name) == final_weights(undisturbed / "whole"), f"{name} after {kills} kills"
        total += kills
    assert total, "every run ended before it could be killed"
