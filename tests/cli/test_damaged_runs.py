"""Runs whose files were cut, changed or are of another kind: each verb says so, and never takes something else in silence."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from perilune.cli.main import main
from perilune.loading import load_run

SHORT = ["--preset", "tiny", "--data.tokenizer", "byte", "--tokens-per-step", "256", "--microbatch-tokens", "256",
         "--precision", "fp32", "--threads", "1", "--eval.final-tokens", "300", "--checkpoint.every", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and a run of two steps with a checkpoint of each."""
    home = tmp_path_factory.mktemp("home")
    draw = random.Random(1)
    (home / "text").mkdir()
    for number in range(8):
        lines = [f"value_{draw.randrange(50)} = {draw.randrange(1000)}" for _ in range(150)]
        (home / "text" / f"file{number}.py").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("PERILUNE_CACHE", str(home / "cache"))
        patch.setattr("perilune.train.trainer.measure_matmul_peak", lambda *a, **k: 1e9)
        assert main(["train", "--run", "a", "--data", "text", "--steps", "2", *SHORT]) == 0
    return home


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, `runs/a`, to damage; its text is that of the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERILUNE_CACHE", str(trained / "cache"))
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return tmp_path / "runs" / "a"


def change_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def newest_weights(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002" / "model-00001-of-00001.safetensors"


def test_eval_tells_its_step(run, capsys):
    assert main(["eval", "--run", "a", "--tokens", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


def test_an_older_checkpoint_is_not_taken_in_silence(run, capsys, caplog):
    change_a_byte(newest_weights(run))
    assert main(["eval", "--run", "a", "--tokens", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    (told,) = {record.getMessage() for record in caplog.records if record.name == "perilune.loading"}
    assert "step-00000002 is damaged" in told and "step-00000001 is used instead" in told


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(run, capsys):
    change_a_byte(newest_weights(run))
    for args in (["eval", "--run", "a", "--step", "2"], ["convert", "a", "out", "--step", "2"]):
        assert main(args) == 1
        assert "step-00000002 is damaged" in capsys.readouterr().err


def test_an_index_that_lacks_its_tables_is_damaged(run, capsys):
    for step in (1, 2):
        index = run / "checkpoints" / f"step-{step:08d}" / "state.json"
        index.write_text('{"format": "perilune-checkpoint", "version": 1, "files": {}, "tensors": {}}')
    assert main(["eval", "--run", "a"]) == 1
    assert "it does not say its step, state" in capsys.readouterr().err


def test_a_summary_of_something_else_is_told(run, capsys):
    for content in ("[1]", "{}", '{"finished": true, "train": 5}'):
        (run / "summary.json").write_text(content)
        assert main(["train", "--run", "a", "--resume"]) == 1
        assert "is not the summary of a run" in capsys.readouterr().err


def test_other_held_out_text_is_told(run, trained, caplog):
    """Files that changed move the boundary: what is scored now may have been trained on."""
    text = run.parents[1] / "text"
    shutil.copytree(trained / "text", text)
    config = run / "config.toml"
    config.write_text(config.read_text().replace(str(trained / "text"), str(text)))
    assert main(["eval", "--run", "a", "--tokens", "50"]) == 0
    assert not [record for record in caplog.records if record.name == "perilune.eval"], "the same text"
    for file in text.iterdir():
        file.write_text(file.read_text() + "\nmore = 1\n")
    assert main(["eval", "--run", "a", "--tokens", "50"]) == 0
    assert "the held-out text is not the one" in caplog.text


def test_a_broken_tokenizer_is_a_note_of_a_conversion(run, capsys):
    (run / "tokenizer.json").write_bytes(b"\xff\xfe")
    assert main(["convert", "a", "out"]) == 0
    assert "tokenizer.json is damaged and was copied as it is" in capsys.readouterr().err
    assert Path("out/config.json").exists()


def test_seeds_that_are_not_scored_yet_do_not_stop_a_comparison(run):
    """Two runs of the same settings without an evaluation: their spread is not a number, and has no place in the table."""
    for name in ("b", "c"):
        shutil.copytree(run, run.with_name(name))
        (run.with_name(name) / "summary.json").unlink()
        (run.with_name(name) / "metrics.jsonl").write_text("")
        config = run.with_name(name) / "config.toml"
        config.write_text(
            config.read_text().replace("seed = 0", f"seed = {ord(name)}").replace("steps = 2", "steps = 3")
        )
    assert main(["report", "a", "b", "c"]) == 0


def test_a_cache_that_cannot_be_written_is_told_with_the_way_out(run, trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "file"))
    assert main(["train", "--run", "b", "--data", str(trained / "text"), "--steps", "1", *SHORT]) == 1
    assert "set PERILUNE_CACHE to a directory that can be written" in capsys.readouterr().err
    assert not Path("runs/b").exists()


def test_what_is_loaded_is_what_was_asked_for(run):
    """The public function takes the same way as the verbs."""
    first, newest = (load_run("a", step=step).model.state_dict() for step in (1, None))
    assert any((first[name] != newest[name]).any() for name in first)


def test_the_next_command_can_be_pasted_into_a_shell(trained, monkeypatch, capsys, tmp_path):
    import shlex

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERILUNE_CACHE", str(trained / "cache"))
    name = "mit Leerzeichen äö"
    shutil.copytree(trained / "runs" / "a", tmp_path / "runs" / name)
    assert main(["eval", "--run", name, "--tokens", "50"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert shlex.split(command) == ["perilune", "report", name]
