"""The checker of the demo's claims fails for each claim that does not hold, and for a page that needs the network."""

from __future__ import annotations

import copy
import json

import check_demo
import pytest

GOOD = {
    "train": {
        "steps": 800,
        "tokens": 1_600_000,
        "token_budget_reached": True,
        "seconds": 181.0,
        "tokens_per_second": 8839.0,
        "loss_first": 8.3,
        "val_bits_per_byte": 1.5,
    },
    "baselines": {"gzip9": 1.9, "xz9e": 1.7, "trigram": 1.7},
    "routing": {"max_over_mean": 1.4, "pooled_worst_layer": 1.08},
    "generate": {"tokens_per_second": 120.0},
    "serve": {"cached_tokens_second_turn": 96},
    "report": "report.html",
}


def run_folder(tmp_path, summary=GOOD, html="<p>all <a href='#top'>inside</a></p>"):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "report.html").write_text(html)
    return tmp_path


def changed(section, name, value):
    summary = copy.deepcopy(GOOD)
    summary[section][name] = value
    return summary


def test_a_good_run_passes(tmp_path, capsys):
    assert check_demo.main([str(run_folder(tmp_path))]) == 0
    assert "0.882 of the trigram's" in capsys.readouterr().out


@pytest.mark.parametrize(
    "section, name, value, words",
    [
        ("train", "val_bits_per_byte", 1.58, "0.929 of the trigram's; allowed: 0.92"),
        ("baselines", "gzip9", 1.4, "not below gzip9"),
        ("baselines", "xz9e", 1.5, "not below xz9e"),
        ("routing", "pooled_worst_layer", 1.2, "pooled routing load is 1.200"),
        ("train", "seconds", 300.0, "training took 300 s"),
        ("serve", "cached_tokens_second_turn", 0, "must be above 0"),
        ("train", "loss_first", float("nan"), "train.loss_first must be a finite number"),
        ("train", "token_budget_reached", None, "token_budget_reached must be"),
    ],
)
def test_each_broken_claim_is_named(tmp_path, capsys, section, name, value, words):
    assert check_demo.main([str(run_folder(tmp_path, changed(section, name, value)))]) == 1
    assert words in capsys.readouterr().out


def test_missing_section_missing_report_and_missing_summary(tmp_path):
    without = {key: value for key, value in GOOD.items() if key != "routing"}
    assert len(check_demo.check(run_folder(tmp_path, without))) == 2
    (tmp_path / "report.html").unlink()
    (tmp_path / "summary.json").write_text(json.dumps(GOOD))
    assert check_demo.check(tmp_path) == ["the report report.html does not exist"]
    (tmp_path / "summary.json").write_text("{")
    assert "cannot be read" in check_demo.check(tmp_path)[0]


@pytest.mark.parametrize(
    "html",
    [
        "<script src='https://cdn.example/p.js'></script>",
        "<link href='//cdn.example/a.css'>",
        "<img srcset=' http://e.example/a.png 2x'>",
        "<style>@import 'https://e.example/a.css';</style>",
        "<style>b{background:url(http://e.example/a.png)}</style>",
        "<p style='background:url(\"https://e.example/a.png\")'>",
    ],
)
def test_a_page_that_needs_the_network_is_seen(html):
    assert check_demo.outside_references(html)


def test_addresses_in_scripts_and_text_are_not_references():
    inside = "<script>var a='https://e.example';</script><p>https://e.example</p><img src='data:image/png;base64,AA=='>"
    assert check_demo.outside_references(inside) == []
