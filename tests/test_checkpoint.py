"""Checkpoints are whole or absent: killed saves, full disks, damage and foreign files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from perilune import checkpoint
from perilune.errors import CapacityError, CheckpointError
from perilune.rundir import RunDir


class Toy(nn.Module):
    def __init__(self, vocab: int = 6, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, 3)
        self.register_buffer("bias", torch.arange(3.0))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def save(run: RunDir, step: int, model: nn.Module | None = None, **options) -> Path:
    torch.manual_seed(step)
    model = model or Toy()
    optimizer = {"muon.momentum.w": torch.full((2, 3), float(step)), "adamw.step.b": torch.tensor(float(step))}
    return checkpoint.save(run, step, model=model.state_dict(), optimizer=optimizer, state={"tokens": step}, **options)


def everything(run: RunDir) -> dict[str, bytes]:
    return {str(p.relative_to(run.path)): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file()}


def test_round_trip_and_any_safetensors_reader(run):
    model = Toy()
    folder = save(run, 3, model, shard_bytes=60)
    names = sorted(p.name for p in folder.glob("model-*"))
    assert len(names) >= 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    merged = {}
    for name in names:
        merged |= load_file(folder / name)
    assert merged.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(merged[name], tensor), name
    other = Toy()
    checkpoint.load_model(folder, other)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    optimizer = checkpoint.read_tensors(folder, "optimizer")
    assert optimizer["adamw.step.b"].shape == () and float(optimizer["adamw.step.b"]) == 3.0
    assert checkpoint.read_index(folder)["state"] == {"tokens": 3}


@pytest.mark.parametrize("dtype", list(checkpoint._NAMES))
def test_every_dtype_survives_the_writer(tmp_path, dtype):
    tensors = {
        "a": torch.arange(7).to(dtype),
        "odd": torch.ones(3, 5).to(dtype).mT,
        "none": torch.empty(0, 2, dtype=dtype),
    }
    checkpoint.write_safetensors(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert all(back[n].dtype == dtype and torch.equal(back[n], t) for n, t in tensors.items())


def test_keeps_the_newest(run):
    for step in (1, 2, 3, 10):
        save(run, step, keep=2)
    assert [step for step, _ in run.checkpoints()] == [3, 10]
    assert sorted(p.name for p in run.checkpoints_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_saving_a_step_again_replaces_it(run):
    save(run, 3)
    model = Toy()
    save(run, 3, model)
    other = Toy()
    checkpoint.load_model(run.checkpoint_path(3), other)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert checkpoint.problems(run.checkpoint_path(3)) == []


@pytest.mark.parametrize("call", range(1, 6))
def test_a_full_disk_keeps_what_was_saved(run, monkeypatch, call):
    """ENOSPC at the n-th write-out of the second save."""
    save(run, 1)
    before = everything(run)
    calls = 0
    real = os.fsync

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    if call <= 4:  # two files, the index, the folder; a fifth call comes after the rename
        with pytest.raises(CapacityError, match=r"no disk space left for .*step-00000002"):
            save(run, 2)
        assert everything(run) == before
        assert run.latest_checkpoint() == run.checkpoint_path(1)
    else:
        with pytest.raises(CapacityError):
            save(run, 2)
        assert checkpoint.problems(run.checkpoint_path(1)) == []
    monkeypatch.undo()
    save(run, 2)
    assert checkpoint.newest(run) == (run.checkpoint_path(2), [])


CHILD = """
import os, sys, torch
from perilune import checkpoint
from perilune.rundir import RunDir
run = RunDir(sys.argv[1])
stop_at = int(sys.argv[2])
calls = 0
real_fsync, real_rename = os.fsync, checkpoint.Path.rename
def point(real):
    def wrapped(*args):
        global calls
        calls += 1
        if calls == stop_at:
            print("here", flush=True)
            sys.stdin.read()      # the parent kills us here
        return real(*args)
    return wrapped
os.fsync = point(real_fsync)
checkpoint.Path.rename = point(real_rename)
torch.manual_seed(2)
tensors = {"w": torch.randn(50, 50)}
checkpoint.save(run, 2, model=tensors, optimizer={"m": torch.zeros(3)}, state={}, keep=1)
print("done", flush=True)
"""


def test_kill_9_at_every_point_of_a_save_leaves_a_whole_checkpoint(run):
    """The child stops before each sync and each rename in turn and is killed there."""
    save(run, 1, keep=1)
    reached = []
    for point in range(1, 12):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(run.path), str(point)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        said = child.stdout.readline().strip()
        child.send_signal(signal.SIGKILL)
        child.wait()
        folder, refused = checkpoint.newest(run)
        assert folder is not None and refused == [], point
        reached.append(said)
        if said == "done":
            break
        if folder == run.checkpoint_path(2):  # killed after the rename: start over from step 1
            checkpoint._discard(folder)
            save(run, 1, keep=1)
        checkpoint.clean(run)
        assert [p.name for p in run.checkpoints_path.iterdir() if p.name.startswith(".")] == []
    assert reached[-1] == "done" and reached.count("here") >= 5
    assert run.latest_checkpoint() == run.checkpoint_path(2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"), [(cut, r"has \d+ bytes instead of \d+"), (flip, "has sha256"), (Path.unlink, "is missing")]
)
@pytest.mark.parametrize("file", ["model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"])
def test_damage_is_refused_by_name_and_the_one_before_is_used(run, damage, says, file):
    save(run, 1)
    folder = save(run, 2)
    damage(folder / file)
    with pytest.raises(CheckpointError, match=rf"step-00000002 is damaged: {file} {says}"):
        checkpoint.verified(folder)
    found, refused = checkpoint.newest(run)
    assert found == run.checkpoint_path(1)
    assert len(refused) == 1 and file in refused[0]


def test_a_cut_file_is_refused_without_hashing_too(run):
    folder = save(run, 1)
    cut(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load_model(folder, Toy())


def test_foreign_folders_say_what_they_are(run, tmp_path):
    with pytest.raises(CheckpointError, match="cannot read state.json"):
        checkpoint.read_index(tmp_path)
    (tmp_path / "state.json").write_text('{"format": "other"}')
    with pytest.raises(CheckpointError, match="format 'other' instead of 'perilune-checkpoint'"):
        checkpoint.read_index(tmp_path)
    folder = save(run, 1)
    index = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(index | {"version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        checkpoint.read_index(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read_index(folder)


def test_another_model_is_refused_with_what_differs(run):
    folder = save(run, 1, Toy(vocab=6))
    with pytest.raises(
        CheckpointError,
        match=r"its vocabulary has 6 tokens, the model's 9; embed\.weight \[9, 4\] in the model, \[6, 4\]",
    ):
        checkpoint.load_model(folder, Toy(vocab=9))
    with pytest.raises(CheckpointError, match=r"head\.weight \[3, 8\] in the model, \[3, 4\] in the checkpoint"):
        checkpoint.load_model(folder, Toy(width=8))
    bigger = Toy()
    bigger.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"only in the model: extra\.bias, extra\.weight"):
        checkpoint.load_model(folder, bigger)
    smaller = Toy()
    del smaller.head
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: head\.bias, head\.weight"):
        checkpoint.load_model(folder, smaller)


def test_a_whole_file_of_other_tensors_contradicts_the_index(run):
    folder = save(run, 1)
    name = "model-00001-of-00001.safetensors"
    entry = checkpoint.write_safetensors(folder / name, {"other": torch.zeros(2)})
    index = json.loads((folder / "state.json").read_text())
    index["files"][name] = entry
    (folder / "state.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="contradicts its index: only in the index: bias"):
        checkpoint.read_tensors(folder, "model")
