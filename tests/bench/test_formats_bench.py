"""Rows of `bench formats` on a small model: what they hold, and what they leave behind. No time is asserted."""

import json

import pytest

from perilune.bench import formats
from perilune.bench.harness import Row, read
from perilune.cli.main import main
from perilune.config.presets import k3, tiny
from perilune.errors import CapacityError, ConfigError
from perilune.loading import load_run
from perilune.shapes.tensors import checkpoint_tensors


def test_a_measured_process_reports_itself(tmp_path):
    formats.write_random(tmp_path / "in", formats.shape_of(4, tiny()))
    told = formats._child(what="convert", source=tmp_path / "in", out=tmp_path / "out", options={})
    assert told["seconds"] > 0 and told["peak_bytes"] > 50e6
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 5
    with pytest.raises(CapacityError, match="out exists"):
        formats._child(what="convert", source=tmp_path / "in", out=tmp_path / "out", options={})


def test_rows_of_a_small_model(tmp_path, monkeypatch):
    """In this process: a fresh one for each conversion takes longer than the rest of the file."""
    monkeypatch.setattr(formats, "_child", lambda **order: formats.work(order))
    results, seen = tmp_path / "rows.jsonl", []
    (tmp_path / "place").mkdir()
    options = {"widths": tiny(), "results": results, "folder": tmp_path / "place"}
    assert formats.run("cpu", 0.0, 4, **options) == []
    rows = formats.run("cpu", None, 4, on_row=lambda row: seen.append(row.name), **options)
    assert [row.name for row in rows] == seen == [f"formats_{name}" for name, *_ in formats.CONVERSIONS]
    assert list((tmp_path / "place").iterdir()) == [], "the checkpoints are gone"
    by_name = {row.name: row.extra for row in rows}
    for row in rows:
        assert row.ratio == row.peer_ms / row.ours_ms and row.bound_ms > 0
        assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row
        assert row.extra["peak_bytes"] > row.extra["largest_shard_bytes"], "an interpreter is larger than this model"
    assert by_name["formats_import_bf16"]["bytes_read"] == by_name["formats_export_bf16"]["bytes_written"]
    packed = by_name["formats_export_mxfp4"]["bytes_written"]
    assert (
        packed < by_name["formats_export_bf16"]["bytes_written"]
        and packed == by_name["formats_import_mxfp4"]["bytes_read"]
    )
    assert formats.run("cpu", 0.0, 4, **options) == rows == read(results), "nothing is measured twice"


def test_the_random_checkpoint_is_a_whole_one(tmp_path):
    cfg = formats.shape_of(4, tiny())
    formats.write_random(tmp_path / "in", cfg)
    from perilune.tokenizer.byte import ByteTokenizer

    ByteTokenizer().save(tmp_path / "in" / "tokenizer.json")
    assert load_run(tmp_path / "in").config.model == cfg


def test_the_default_has_the_released_widths():
    cfg = formats.shape_of(8)
    assert cfg.layer_mixers == ("kda", "mla", "kda", "mla")
    assert (cfg.hidden_size, cfg.kda, cfg.mla) == (k3().hidden_size, k3().kda, k3().mla)
    largest = max(spec.nbytes for spec in checkpoint_tensors(cfg, packed_experts=False))
    assert largest == 33792 * 7168 * 2


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="converts on the CPU"):
        formats.run("cuda")
    with pytest.raises(ConfigError, match="at least 2"):
        formats.run("cpu", None, 1)
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(CapacityError, match="use fewer --experts"):
        formats.run("cpu", None, 4, widths=tiny(), folder=tmp_path)


def test_the_verb_knows_the_suite(capsys, tmp_path):
    assert main(["bench", "formats", "--budget", "1e-9", "--experts", "1", "--json"]) == 2
    assert "--experts 1 must be at least 2" in capsys.readouterr().err
