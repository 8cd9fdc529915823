"""A run folder: atomic files, metrics that survive a cut, and which checkpoint is the last whole one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from perilune.config.presets import training
from perilune.errors import CapacityError, CheckpointError, ConfigError
from perilune.rundir import RunDir, config_hash, incomplete, write_atomic


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def put_checkpoint(run: RunDir, step: int, content: bytes = b"x" * 10) -> Path:
    folder = run.checkpoint_path(step)
    folder.mkdir(parents=True)
    (folder / "model-00001-of-00001.safetensors").write_bytes(content)
    index = {"files": {"model-00001-of-00001.safetensors": {"bytes": 10, "sha256": ""}}}
    (folder / "state.json").write_text(json.dumps(index))
    return folder


def test_a_bare_name_lives_under_runs_and_a_path_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDir.resolve("demo").path == Path("runs/demo")
    assert RunDir.resolve("./demo").path == Path("demo")
    assert RunDir.resolve(tmp_path / "x").path == tmp_path / "x"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.toml").write_text("")
    assert RunDir.resolve("here").path == Path("here"), "a folder that holds a run is meant itself"
    assert RunDir.resolve("here").name == "here"


def test_config_round_trips_and_carries_its_hash(run):
    config = training("tiny")
    run.write_config(config)
    assert run.read_config() == config
    assert (run.path / "config.toml").read_text().splitlines()[0] == f"# sha256 {config_hash(config)}"


def test_a_folder_without_a_run_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = RunDir.resolve("known")
    made.create()
    made.write_config(training("tiny"))
    with pytest.raises(CheckpointError, match=r"no run in runs/other .*runs here: known"):
        RunDir.resolve("other").read_config()


def test_a_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use .*file as a run folder"):
        RunDir(tmp_path / "file").create()


def test_metrics_survive_a_cut_last_line_and_are_truncated_on_resume(run):
    for step in range(1, 6):
        run.append_metrics({"kind": "train", "step": step, "loss": float("nan") if step == 2 else 1.0})
    run.append_metrics({"kind": "eval", "step": 3, "nats": 7.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [r["step"] for r in run.read_metrics("train")] == [1, 2, 3, 4, 5]
    assert run.read_metrics("train")[1]["loss"] is None, "NaN is not JSON"
    run.truncate_metrics(3)
    assert [(r["kind"], r["step"]) for r in run.read_metrics()] == [
        ("train", 1), ("train", 2), ("train", 3), ("eval", 3),
    ]  # fmt: skip


def test_latest_checkpoint_is_the_last_whole_one(run):
    assert run.latest_checkpoint() is None
    whole = put_checkpoint(run, 10)
    put_checkpoint(run, 20, content=b"x" * 7)  # cut
    (run.checkpoints_path / ".step-00000030.tmp-1").mkdir()  # half-written
    (run.checkpoint_path(40)).mkdir()  # no index
    assert run.latest_checkpoint() == whole
    assert incomplete(run.checkpoint_path(20)) == ["model-00001-of-00001.safetensors has 7 bytes instead of 10"]
    (whole / "model-00001-of-00001.safetensors").unlink()
    assert incomplete(whole) == ["model-00001-of-00001.safetensors is missing"]
    assert run.latest_checkpoint() is None


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"a": {}}}', "\x00"])
def test_a_damaged_index_is_incomplete_not_a_traceback(run, text):
    folder = put_checkpoint(run, 1)
    (folder / "state.json").write_text(text)
    assert incomplete(folder) == ["state.json is not a checkpoint index"]


def test_an_atomic_write_holds_every_byte(run):
    path = run.path / "x.bin"
    for content in (bytes(range(256)) * 3, b"", b"last"):
        write_atomic(path, content)
        assert path.read_bytes() == content


def test_a_full_disk_leaves_the_old_file_and_nothing_else(run, monkeypatch):
    run.write_json("summary.json", {"a": 1})
    before = sorted(os.listdir(run.path))

    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match=r"no disk space left for .*summary\.json"):
        write_atomic(run.path / "summary.json", b"new")
    assert run.read_json("summary.json") == {"a": 1}
    assert sorted(os.listdir(run.path)) == before


def test_read_json_names_the_file(run):
    with pytest.raises(CheckpointError, match=r"cannot read .*split\.json"):
        run.read_json("split.json")
    (run.path / "split.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        run.read_json("split.json")


def test_one_writer_at_a_time(run):
    with run.lock(), pytest.raises(ConfigError, match="another process is writing"), run.lock():
        pass
    with run.lock():
        pass
