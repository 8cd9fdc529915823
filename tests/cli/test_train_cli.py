"""`perilune train` and `perilune eval` as a user types them: exit codes, messages, JSON, kill -9 and resume."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perilune.cli.main import main
from perilune.ops import build_cache
from perilune.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--preset", "tiny", "--data.tokenizer", "byte", "--tokens-per-step", "256", "--microbatch-tokens", "256",
         "--precision", "fp32", "--threads", "1", "--eval.final-tokens", "300"]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A working directory with a text of 20 KB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perilune.train.run_data.cache_directory", lambda: cache)
    monkeypatch.setattr("perilune.train.trainer.measure_matmul_peak", lambda *a, **k: 1e9)
    draw = random.Random(1)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        lines = [f"value_{draw.randrange(50)} = {draw.randrange(1000)}" for _ in range(150)]
        (text / f"file{number}.py").write_text("\n".join(lines))
    return tmp_path


def words(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_train_then_resume_then_eval(home, capsys):
    assert main(["train", "--run", "a", "--data", "text", "--steps", "3", *SHORT, "--json"]) == 0
    out, err = words(capsys)
    summary = json.loads(out)
    assert summary["train"]["steps"] == 3 and summary["run"] == "runs/a"
    assert "held-out tokens" in err and "bits/byte" in err
    weights = (home / "runs/a/checkpoints/step-00000003/model-00001-of-00001.safetensors").stat().st_mtime_ns

    assert main(["train", "--run", "a", "--resume", "--json"]) == 0
    out, err = words(capsys)
    assert json.loads(out) == summary and "is finished; nothing to do" in err
    assert (home / "runs/a/checkpoints/step-00000003/model-00001-of-00001.safetensors").stat().st_mtime_ns == weights

    assert main(["train", "--run", "a", "--data", "text", "--steps", "3", *SHORT, "--resume"]) == 0, (
        "the same command, resumed"
    )
    assert main(["eval", "--run", "a", "--tokens", "300", "--json"]) == 0
    result = json.loads(words(capsys)[0])
    assert result["bits_per_byte"] == pytest.approx(summary["train"]["val_bits_per_byte"], rel=1e-6)
    assert main(["eval", "--run", "a"]) == 0
    assert "bits/byte on" in words(capsys)[0]


def test_the_end_says_what_to_do_next(home, capsys):
    assert main(["train", "--run", "b", "--data", "text", "--steps", "2", *SHORT]) == 0
    out, _ = words(capsys)
    assert "trained     2 steps, 512 tokens" in out and "next: perilune generate --run b" in out


def test_the_folders_config_trains_it_again(home, capsys):
    assert main(["train", "--run", "a", "--data", "text", "--steps", "2", *SHORT]) == 0
    assert main(["train", "--config", "runs/a/config.toml", "--run", "again"]) == 0
    first, second = (RunDir(home / "runs" / name).read_metrics("train") for name in ("a", "again"))
    assert [r["loss"] for r in first] == [r["loss"] for r in second]


def test_a_partial_file_lies_over_its_preset_and_flags_over_it(home):
    Path("my.toml").write_text(
        'preset = "tiny"\nsteps = 7\n[optim]\nlr_muon = 0.5\n[data]\ntokenizer = "byte"\npath = ["text"]\n'
    )
    assert main(["train", "--config", "my.toml", "--run", "c", "--steps", "1", "--eval.final-tokens", "100"]) == 0
    config = RunDir(home / "runs/c").read_config()
    assert (config.steps, config.optim.lr_muon, config.model.hidden_size) == (1, 0.5, 64)
    assert config.data.path == (str(home / "text"),)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--stepps", "3"], 2, "Unrecognized options"),
        (["--optim.lr-moun", "3"], 2, "Unrecognized options"),
        (["--steps", "many"], 2, "--steps"),
        (["--preset", "tinny"], 2, "did you mean 'tiny'"),
        (["--preset", "k3"], 2, "not for training on one machine"),
        (["--model.moe.experts-per-token", "8"], 2, "moe.experts_per_token=8"),
        (["--model.attn-res-block-layers", "0"], 2, "must be at least 1"),
        (["--config", "absent.toml"], 2, "cannot read the config file absent.toml"),
        (["--config", "broken.toml"], 2, "not valid TOML"),
        (["--config", "unknown.toml"], 2, "unknown setting stepz; perhaps you meant steps"),
        (["--data", "nowhere"], 1, "nowhere"),
        (["--data", "empty"], 1, "no text in"),
        (["--data", "latin.txt"], 1, "latin.txt"),
        (["--resume"], 1, "no run in runs/x"),
        (["--data.tokenizer", "byte", "--model.vocab-size", "200"], 2, "has 288 ids, the model only 200"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_run(home, capsys, args, code, says):
    Path("broken.toml").write_text("steps = \n")
    Path("unknown.toml").write_text('preset = "tiny"\nstepz = 3\n')
    Path("empty").mkdir()
    Path("latin.txt").write_bytes("für".encode("latin-1") * 40)
    base = [] if "--data" in args else ["--data", "text"]
    preset = [] if "--preset" in args or "--config" in args else ["--preset", "tiny"]
    assert main(["train", "--run", "x", *base, *preset, *args]) == code
    out, err = words(capsys)
    assert says in err and err.strip().startswith("error: ") and "Traceback" not in err and out == ""
    assert not (home / "runs" / "x").exists()


def test_an_existing_run_says_what_to_do(home, capsys):
    assert main(["train", "--run", "a", "--data", "text", "--steps", "1", *SHORT]) == 0
    assert main(["train", "--run", "a", "--data", "text", "--steps", "1", *SHORT]) == 2
    assert "exists already; continue it with --resume" in words(capsys)[1]
    assert main(["train", "--run", "a", "--resume", "--steps", "9"]) == 2
    assert "steps: the run has 1, now 9" in words(capsys)[1]
    assert main(["train", "--resume"]) == 2
    assert "--resume needs --run" in words(capsys)[1]


def test_eval_of_nothing(home, capsys):
    assert main(["eval"]) == 2 and "--run NAME is needed" in words(capsys)[1]
    assert main(["eval", "--run", "absent"]) == 1 and "no run in runs/absent" in words(capsys)[1]


def test_help_is_short_and_help_all_has_every_setting(capsys):
    for verb in ("train", "eval"):
        assert main([verb, "--help"]) == 0
        flags = [line for line in words(capsys)[0].splitlines() if line.strip().startswith("--")]
        assert 1 <= len(flags) <= 12
    assert main(["train", "--help-all"]) == 0
    text = words(capsys)[0]
    assert "--optim.lr-muon" in text and "--model.residual" in text


def spawn(home: Path, cache: Path, *args: str) -> subprocess.Popen[str]:
    """The command in a process of its own; its prepared text is put aside, compiled kernels are shared."""
    kernels = next(build_cache.directories("native"))
    own = cache / "perilune"
    own.mkdir(exist_ok=True)
    if not (own / "native").exists():
        (own / "native").symlink_to(kernels)
    environment = os.environ | {"PERILUNE_CACHE": str(own), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "perilune", "train", *args], cwd=home, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def final_weights(home: Path, run: str, step: int) -> bytes:
    (path,) = (home / "runs" / run / "checkpoints" / f"step-{step:08d}").glob("model-*.safetensors")
    return path.read_bytes()


def test_kill_9_then_resume_gives_the_undisturbed_weights(home, cache):
    """Killed at a moment that nobody chose, while it saves after every step."""
    args = ["--data", "text", "--steps", "20", "--checkpoint.every", "1", *SHORT]
    whole = spawn(home, cache, "--run", "whole", *args)
    assert whole.wait() == 0, whole.stdout.read()
    killed = spawn(home, cache, "--run", "killed", *args)
    run = RunDir(home / "runs" / "killed")
    wait_for(lambda: len(run.read_metrics("train")) >= 3, killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (run.path / "summary.json").exists()
    resumed = spawn(home, cache, "--run", "killed", "--resume")
    assert resumed.wait() == 0, resumed.stdout.read()
    assert final_weights(home, "killed", 20) == final_weights(home, "whole", 20)
    assert [r["step"] for r in run.read_metrics("train")] == list(range(1, 21))


def test_ctrl_c_saves_and_exits_130(home, cache):
    args = ["--data", "text", "--steps", "100000", *SHORT]
    process = spawn(home, cache, "--run", "stopped", *args)
    run = RunDir(home / "runs" / "stopped")
    wait_for(lambda: len(run.read_metrics("train")) >= 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    said = process.stdout.read()
    assert "go on with: perilune train --run stopped --resume" in said and "Traceback" not in said
    step = run.read_metrics("train")[-1]["step"]
    assert run.latest_checkpoint() == run.checkpoint_path(step)
