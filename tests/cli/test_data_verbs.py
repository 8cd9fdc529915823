"""`perilune data` and `perilune tokenize`, as a user types them."""

from __future__ import annotations

import io
import json
import sys

import pytest

from perilune.cli import data, tokenize
from perilune.data.corpus import read_paths
from perilune.data.split import split
from perilune.errors import ConfigError, RequestError
from perilune.tokenizer import load_tokenizer, train_bpe


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "mine"
    root.mkdir()
    for i in range(12):
        text = f"a rather long line of text number {i} that no other file has\n" * (i + 1)
        (root / f"f{i}.txt").write_text(text)
    return root


def test_stats_of_a_folder(folder, capsys):
    assert data.run(["stats", str(folder), "--tokenizer", "byte", "--holdout", "0.3"]) == 0
    shown = capsys.readouterr().out
    assert str(sum(f.stat().st_size for f in folder.iterdir())) not in shown  # sizes are of the parts
    assert "held out: mine/" in shown and "tokens" in shown


def test_described_sizes_add_up(folder):
    corpus = read_paths([folder])
    parts = split(corpus, holdout=0.3)
    facts = data.describe(corpus, parts, load_tokenizer("byte"))
    assert facts["train"]["bytes"] + facts["held_out"]["bytes"] == facts["bytes"] == corpus.num_bytes
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == facts["documents"] == 12
    for part in ("train", "held_out"):
        assert facts[part]["tokens"] == facts[part]["bytes"] + facts[part]["documents"], "a byte a token, and [EOS]"
    json.dumps(facts)


def test_inspect_lists_every_document_with_its_part(folder, capsys):
    assert data.run(["inspect", str(folder), "--tokenizer", "none"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("train ", "held_out "))]
    assert len(lines) == 12 and any(line.startswith("held_out ") for line in lines)


def test_build_mixed_and_read_it_back(tmp_path, capsys):
    assert data.run(["build", "mixed", "--out", str(tmp_path / "c"), "--packages", "pytest"]) == 0
    shown = capsys.readouterr().out
    assert "PSF-2.0" in shown and "perilune train --data" in shown
    assert data.run([str(tmp_path / "c" / "corpus.jsonl"), "--tokenizer", "none"]) == 0


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (["build", "foo"], ConfigError, "only recipe is `mixed`"),
        (["--holdout", "1.5"], ConfigError, "strictly between"),
        (["--holdaut", "0.5"], ConfigError, "--holdout"),
        (["nowhere"], RequestError, "no such file"),
    ],
)
def test_data_refusals(args, error, match):
    with pytest.raises(error, match=match):
        data.run(args)


def test_tokenize_text_with_a_run_s_tokenizer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bpe = train_bpe(["hello moon\n" * 50], 320)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    bpe.save(tmp_path / "runs" / "demo" / "tokenizer.json")
    assert tokenize.run(["hello moon", "<|open|>"]) == 0
    ids, pieces, summary = capsys.readouterr().out.splitlines()
    assert [int(i) for i in ids.split()] == bpe.encode("hello moon <|open|>")
    assert pieces.startswith("hello| moon| ") and "320 ids" in summary
    assert tokenize.run(["--decode", ids + f",{bpe.special.open}"]) == 0
    assert capsys.readouterr().out == "hello moon <|open|><|open|>\n"


def test_tokenize_any_bytes_from_a_file_and_from_standard_input(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\na")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\na")))
    for args in (["--file", "b"], []):
        assert tokenize.run(args) == 0
        assert capsys.readouterr().out.splitlines()[:2] == ["255 10 97", r"\xff|\n|a"]


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (["--run", "a", "--tokenizer", "byte"], ConfigError, "give one of them"),
        (["x", "--file", "y"], ConfigError, "give one of them"),
        (["--file", "nowhere"], RequestError, "cannot read nowhere"),
        (["--run", "nowhere", "x"], RequestError, "cannot read the tokenizer"),
        (["--decode", "abc"], RequestError, "'abc' is not a token id"),
        (["--decode", "[99999]"], RequestError, "outside the byte vocabulary"),
    ],
)
def test_tokenize_refusals(args, error, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        tokenize.run(args)
