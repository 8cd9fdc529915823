"""The demo end to end on a little text: every stage leaves its numbers, a second demo sets the first one aside."""

import json

import pytest

from perilune.cli.demo import DemoFlags, demo_config
from perilune.cli.main import main
from perilune.errors import ConfigError
from perilune.rundir import RunDir

pytest.importorskip("starlette", reason="the demo serves: it needs the extra serve")
pytest.importorskip("plotly", reason="the demo reports: it needs the extra report")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(30):
        lines = [f"def f{n}_{i}(a, b={i * n % 13}):\n    return a * {i % 7} + b" for i in range(120)]
        (folder / f"module{n}.py").write_text("\n".join(lines))
    return folder


def test_all_stages_on_other_text(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = ["demo", "--steps", "3", "--data", str(corpus), "--json"]
    assert main(call) == 0
    printed = json.loads(capsys.readouterr().out)
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    assert printed["train"] == summary["train"] and summary["train"]["steps"] == 3
    assert set(summary["baselines"]) == {"gzip9", "xz9e", "trigram"}
    assert summary["routing_without_balancing"]["steps"] == 20
    assert summary["generate"]["tokens_per_second"] > 0
    # The second turn reuses the whole first one: its prompt is longer than what was run for it.
    serve = summary["serve"]
    assert 0 < serve["cached_tokens_second_turn"] < serve["prompt_tokens_second_turn"]
    assert (tmp_path / summary["report"]).stat().st_size > 10_000
    with RunDir("runs/demo").lock():
        assert main(call) == 2 and "another process" in capsys.readouterr().err
    assert not (tmp_path / "runs/demo.previous").exists()
    assert main(call) == 0
    assert (tmp_path / "runs/demo.previous/summary.json").exists()


def test_config_and_mistakes():
    config = demo_config(DemoFlags(steps=10, time_limit=5.0, seed=3))
    assert (config.steps, config.time_limit, config.seed) == (10, 5.0, 3)
    with pytest.raises(ConfigError, match="--time-limit 0"):
        demo_config(DemoFlags(time_limit=0.0))
