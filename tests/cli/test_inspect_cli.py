"""`perilune inspect` and the dispatcher."""

import json

import pytest

from perilune.cli.main import VERBS, available, main
from perilune.config.parse import to_toml
from perilune.config.presets import training


def test_k3_prints_the_published_numbers(capsys):
    assert main(["inspect", "--preset", "k3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["total_params"] == 2_779_931_837_184 and facts["text_params"] == 2_779_484_478_208
    assert facts["active_params"] == 104_189_614_848 and facts["vision_params"] == 401_214_464
    assert facts["checkpoint_tensors"] == 497_220 and facts["checkpoint_bytes"] == 1_560_860_324_864
    assert (facts["kda_layers"], facts["mla_layers"]) == (69, 24)
    assert facts["state_bytes_per_sequence"] == 449_372_160 and facts["cache_bytes_per_token"] == 27_648


def test_tensors_of_a_run_config(capsys, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(training("tiny")))
    assert main(["inspect", "--config", str(path), "--tensors", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["count"] == len(facts["tensors"]) and facts["total_bytes"] == sum(t["bytes"] for t in facts["tensors"])
    assert main(["inspect", "--config", str(path)]) == 0
    assert "3 kda, mla" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["inspect", "--preset", "k33"], 2, "did you mean 'k3'"),
        (["inspect", "--preset", "k2_nano", "--tensors"], 2, "published"),
        (["inspect", "--seq-len", "0"], 2, "--seq-len 0"),
        (["insect"], 2, "did you mean 'inspect'"),
        ([], 2, ""),
    ],
)
def test_mistakes(args, code, text, capsys):
    assert main(args) == code
    assert text in capsys.readouterr().err


def test_help_lists_only_verbs_that_exist(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert set(available()) <= set(VERBS)
    assert all((f"  {verb} " in out) == (verb in available()) for verb in VERBS)
