"""What no verb may accept: numbers that are not finite or out of range, empty names, names given twice, broken files.

Each ends with one of our errors, before anything is computed or written.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from perilune.cli.main import main

TRAIN = ["train", "--preset", "tiny", "--run", "r", "--data", "text"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    (tmp_path / "text").mkdir()
    for name in ("a", "b", "c", "d"):
        (tmp_path / "text" / f"{name}.py").write_text(f"{name} = 1\n" * 50)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([*TRAIN, "--optim.lr-muon", "nan"], 2, "--optim.lr-muon nan must be a finite number"),
        ([*TRAIN, "--optim.grad-clip", "inf"], 2, "--optim.grad-clip inf must be a finite number"),
        ([*TRAIN, "--time-limit", "nan"], 2, "--time-limit nan must be a finite number"),
        ([*TRAIN, "--time-limit", "-5"], 2, "time_limit=-5.0 must not be negative"),
        ([*TRAIN, "--probe-every", "-1"], 2, "probe_every=-1 must not be negative"),
        ([*TRAIN, "--threads", "-3"], 2, "threads=-3 must lie in 0"),
        ([*TRAIN, "--threads", "100000"], 2, "threads=100000 must lie in 0"),
        ([*TRAIN, "--seed", "-1"], 2, "seed=-1 must lie in 0"),
        ([*TRAIN, "--seed", "18446744073709551615"], 2, "must lie in 0 to 4294967295"),
        ([*TRAIN, "--optim.beta1", "1"], 2, "optim.beta1=1.0 must lie in [0, 1)"),
        ([*TRAIN, "--data.long-document-weight", "-1"], 2, "data.long_document_weight=-1.0 must not be negative"),
        ([*TRAIN, "--model.vocab-size", "99999999999"], 2, "at most 4194304"),
        (["train", "--preset", "tiny", "--run", "r", "--data", ""], 2, "empty name"),
        (["train", "--preset", "tiny", "--run", ""], 2, "the name of a run is empty"),
        (["train", "--config", "number.toml"], 2, "preset=3 must be one of the names"),
        (["train", "--config", "deep.toml"], 2, "not valid TOML"),
        (["inspect", "--config", "model.toml"], 2, "model=5 must be a table"),
        (["inspect", "--config", "tables.toml"], 2, "must be a table"),
        (["inspect", "--config", "deep.json"], 2, "not valid JSON"),
        (["eval", "--run", "nowhere", "--tokens", "-1"], 2, "must be 0 (all) or more"),
        (["explain", "kda", "--seed", "-1"], 2, "--seed -1 must lie in 0"),
        (["explain", "kda", "--png", "picture.foo"], 1, "ends in .png"),
        (["report", ""], 2, "the name of a run is empty"),
        (["convert", "", "out"], 2, "the name of a run is empty"),
        (["data", "stats", ""], 1, "a path of the text is empty"),
        (["data", "stats", "latin.txt"], 1, "set on-bad-text to skip or replace"),
        (["data", "stats", "text", "--vocab-size", "99999999999"], 2, "at most 4194304"),
        (["bench", "kernels", "--threads", "-1"], 2, "--threads -1 must lie in 0"),
        (["bench", "kernels", "--budget", "nan"], 2, "--budget nan must be a finite number"),
        (["bench", "kernels", "--budget", "-1"], 2, "--budget -1.0 must not be negative"),
        (["bench", "kernels", "--results", "."], 2, "is no results file"),
        (["bench", "kernels", "--results", "latin.txt"], 2, "is no results file"),
        (["bench", "serve", "--requests", "0"], 2, "--requests 0 must be at least 1"),
        (["bench", "serve", "--url", "foo"], 2, "must begin with http"),
        (["bench", "serve", "--url", "http://127.0.0.1:1"], 1, "no OpenAI-style server"),
        (["ablate", "--vary", "residual,residual"], 2, "the factor residual more than once"),
        (["ablate", "--vary", "residual=plain,plain"], 2, "names a value twice"),
        (["ablate", "--vary", "residual", "--run", "run"], 2, "is a run, not the parent folder"),
        (["demo", "--time-limit", "nan"], 2, "--time-limit nan must be a finite number"),
    ],
)
def test_refused(args, code, words, capsys):
    Path("number.toml").write_text("preset = 3\n")
    Path("model.toml").write_text("model = 5\n")
    Path("tables.toml").write_text("[[model]]\na = 1\n")
    Path("deep.toml").write_text("x = " + "[" * 100_000)
    Path("deep.json").write_text("[" * 100_000)
    Path("latin.txt").write_bytes("Müll".encode("latin-1"))
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/config.toml").write_text("")
    before = sorted(Path.cwd().rglob("*"))
    assert main(args) == code
    told = capsys.readouterr().err
    assert words in told and told.splitlines()[-1].startswith("error: "), told
    assert sorted(Path.cwd().rglob("*")) == before, "nothing was written"


def test_too_little_text_is_told_before_the_run_begins(capsys):
    """Else the first step fails, and the folder that is left makes the same command fail with more text, too."""
    assert main([*TRAIN, "--data.tokenizer", "byte", "--tokens-per-step", "4096", "--stages.0.seq-len", "4096"]) == 1
    assert "too few for one window of 4096" in capsys.readouterr().err
    assert not Path("runs/r").exists()


def test_a_device_as_the_output_stays_a_device(tmp_path):
    """`--out /dev/null` once replaced the device by a file, for every process of the machine."""
    from perilune.rundir import write_atomic

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, b"page")
        assert os.read(reader, 10) == b"page" and stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


def test_the_help_of_bench_names_what_can_be_measured(capsys):
    assert main(["bench", "--help"]) == 0
    usage = capsys.readouterr().out.split("options", 1)[0]
    assert "{kernels,train,formats,cache,engine,serve}" in usage


def test_inspect_finds_a_run_by_its_name(capsys):
    from perilune.config.parse import to_toml
    from perilune.config.presets import training

    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.toml").write_text(to_toml(training("tiny")))
    assert main(["inspect", "--model", "mine", "--json"]) == 0
    assert main(["inspect", "--preset", "tiny", "--json"]) == 0
    by_name, by_preset = capsys.readouterr().out.splitlines()
    assert json.loads(by_name) == json.loads(by_preset)
