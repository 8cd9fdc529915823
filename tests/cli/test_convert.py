"""`perilune convert`, and the verbs that read what it writes."""

import json

import pytest
import torch

from perilune import checkpoint
from perilune.cli.main import main
from perilune.config import TrainConfig
from perilune.config.presets import tiny
from perilune.model import Transformer, init_weights
from perilune.rundir import RunDir
from perilune.tokenizer.byte import ByteTokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "mine")
    run.create()
    run.write_config(TrainConfig(model=tiny()))
    ByteTokenizer().save(run.tokenizer_path)
    checkpoint.save(run, 3, model=init_weights(Transformer(tiny())).state_dict(), optimizer={}, state={})
    return tmp_path


def ask(capsys, *args):
    code = main(list(args))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_there_and_back(folder, capsys):
    code, out, err = ask(capsys, "convert", "mine", "k3", "--experts", "mxfp4", "--verify", "--json")
    done = json.loads(out)
    assert code == 0 and done["to"] == "kimi-k3" and done["experts"] == "mxfp4" and done["verified"]
    assert done["bytes"] == sum(p.stat().st_size for p in (folder / "k3").glob("*.safetensors"))
    assert "byte tokenizer" in err
    code, out, _ = ask(capsys, "convert", "k3", "again")
    assert code == 0 and "again: native, experts bf16" in out and "perilune generate --run again" in out
    texts = []
    for flag, path in (("--model", "./k3"), ("--model", "k3"), ("--run", "./again")):
        code, out, _ = ask(
            capsys, "generate", flag, path, "--prompt", "x", "--max-tokens", "5", "--temperature", "0", "--json"
        )
        assert code == 0
        texts.append(json.loads(out)["text"])
    assert len(set(texts)) == 1
    code, out, _ = ask(capsys, "chat", "--model", "k3", "--once", "hi", "--max-tokens", "3", "--json")
    assert code == 0 and json.loads(out)["completion_tokens"] == 3


def test_load_takes_a_published_folder(folder, capsys):
    import perilune

    assert ask(capsys, "convert", "mine", "k3")[0] == 0
    loaded = perilune.load(folder / "k3")
    assert loaded.config.model == tiny()
    with torch.no_grad():
        assert loaded.model(torch.arange(5)[None]).logits_BTZ.isfinite().all()


def test_inspect_reads_the_published_config(folder, capsys):
    assert ask(capsys, "convert", "mine", "k3")[0] == 0
    told = []
    for args in (("--model", "k3"), ("--config", "k3/config.json"), ("--model", "runs/mine"), ("--preset", "tiny")):
        code, out, _ = ask(capsys, "inspect", *args, "--tensors", "--json")
        assert code == 0
        told.append(json.loads(out))
    assert told[0] == told[1] == told[2] == told[3]
    assert ask(capsys, "inspect", "--model", "nothing")[0] == 2
    code, _, err = ask(capsys, "inspect", "--model", "k3", "--config", "k3/config.json")
    assert code == 2 and "exclude each other" in err


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ([], 2, "IN and OUT are needed"),
        (["mine"], 2, "IN and OUT are needed"),
        (["mine", "out", "--format", "x"], 2, "perilune convert --help"),
        (["mine", "out", "--to", "gguf"], 2, "allowed: kimi-k3, kimi-linear, native"),
        (["mine", "runs"], 1, "runs exists"),
        (["nobody", "out"], 1, "no run in"),
    ],
)
def test_mistakes(folder, capsys, args, code, text):
    found, _, err = ask(capsys, "convert", *args)
    assert found == code and text in err
    assert not (folder / "out").exists()


def test_progress_lines_where_there_is_no_terminal(folder, capsys, monkeypatch):
    import perilune.cli.convert as verb

    monkeypatch.setattr(verb, "PLAIN_EVERY", 0.0)
    _, _, err = ask(capsys, "convert", "mine", "k3")
    assert "100% of" in err and "model-00005-of-00005" in err
    assert ask(capsys, "convert", "--help")[1].startswith("usage: perilune convert")
