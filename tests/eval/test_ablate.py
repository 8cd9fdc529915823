"""An ablation end to end on tiny models; its statistics against hand-computed numbers; continuing after a stop."""

import json
from dataclasses import asdict, replace

import pytest

from perilune.cli.ablate import parse_vary
from perilune.config import EvalConfig
from perilune.config.presets import training
from perilune.errors import ConfigError
from perilune.eval.ablate import folder_name, mean_and_interval, run_ablation, table
from perilune.eval.factors import plan


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(24):
        lines = [f"value_{n}_{i} = compute({i * n % 17}, {i * i % 23})" for i in range(60)]
        (folder / f"module{n}.py").write_text("\n".join(lines))
    return folder


def small(corpus):
    base = training("tiny")
    return replace(
        base,
        steps=3,
        data=replace(base.data, path=(str(corpus),), tokenizer="byte"),
        eval=EvalConfig(final_tokens=2048),
    )


def test_runs_all_cells_and_continues_without_repeating(corpus, tmp_path):
    variants = plan(small(corpus), [("residual", ("plain", "block"))])
    started = []
    rows = run_ablation(variants, 2, tmp_path / "abl", on_trainer=lambda label, seed, _: started.append((label, seed)))
    assert started == [(f"residual={r}", s) for r in ("plain", "block") for s in (0, 1)]
    assert [len(row.bits_per_byte) for row in rows] == [2, 2] and rows[0].difference is None
    assert rows[1].difference == pytest.approx(rows[1].mean - rows[0].mean)
    assert all(4 < b < 12 for row in rows for b in row.bits_per_byte)
    again = run_ablation(variants, 2, tmp_path / "abl", on_trainer=lambda *_: pytest.fail("ran a finished cell again"))
    written = json.loads((tmp_path / "abl" / "ablation.json").read_text())
    assert again == rows and written == {"rows": [asdict(row) for row in rows], "seeds": 2}


def test_mean_and_interval_by_hand():
    assert mean_and_interval([1.0]) == (1.0, None)
    mean, half = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 * 1.0 / 3**0.5)


def test_differences_are_paired_by_seed(corpus):
    variants = plan(small(corpus), [("residual", ("plain", "block"))])
    made = [[{"train": {"val_bits_per_byte": b}, "routing": {"pooled_worst_layer": 1.5}} for b in scores]
            for scores in ([2.0, 3.0, 4.0], [1.9, 2.9, 3.9])]  # fmt: skip
    row = table(variants, made)[1]
    # The seeds scatter by 1, the paired difference not at all.
    assert row.difference == pytest.approx(-0.1) and row.difference_interval == pytest.approx(0, abs=1e-9)
    assert row.settled and row.interval > 2 and row.routing == 1.5


def test_vary_words():
    assert parse_vary(("residual=plain,full", "ffn,mixer")) == [
        ("residual", ("plain", "full")),
        ("ffn", ()),
        ("mixer", ()),
    ]
    for word, message in (
        ("residual=plain", "two or more"),
        ("residual=plain,x", "unknown values"),
        ("dept", "unknown factor"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_vary((word,))


def test_runs_of_another_ablation_are_not_taken_for_this_one(corpus, tmp_path):
    base = small(corpus)
    vary = [("residual", ("plain", "block"))]
    run_ablation(plan(base, vary), 1, tmp_path / "abl", on_trainer=lambda *_: None)
    for other in (replace(base, steps=2), replace(base, optim=replace(base.optim, lr_muon=0.5))):
        with pytest.raises(ConfigError, match="steps: the run has 3|lr_muon: the run has"):
            run_ablation(plan(other, vary), 1, tmp_path / "abl", on_trainer=lambda *_: None)


def test_folder_names():
    assert folder_name("residual=full_sublayer", 3) == "residual-full-sublayer-seed3"
