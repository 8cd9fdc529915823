"""What a report shows of a run that was asked about pictures."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from perilune.report import build

pytest.importorskip("plotly", reason="needs the extra report")
pytest.importorskip("jinja2", reason="needs the extra report")

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJRU5ErkJggg=="
)


def share(correct: int, total: int = 200) -> dict:
    return {"correct": correct, "total": total, "accuracy": correct / total, "low": 0.5, "high": 0.75}


def with_pictures(folder: Path, *samples: dict) -> str:
    """The page of a run whose summary has an exam and these samples."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "a.png").write_bytes(PNG)
    summary = json.loads((folder / "summary.json").read_text())
    exam = {
        "question": "What shape is it?", "chance": 0.125, "generated": share(180), "blind_generated": share(26),
        "scored": share(184), "blind_scored": share(24),
    }  # fmt: skip
    summary["vision"] = {
        "pictures": 200,
        "held_out": {"shape": exam},
        "unseen": {"shape": exam},
        "samples": list(samples),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return build([folder]).read_text()


def sample(answer: str, right: str = "a red circle", file: str = "pictures/a.png") -> dict:
    return {
        "file": file,
        "kind": "shape",
        "part": "held_out",
        "question": "what is this?",
        "right": right,
        "answer": answer,
    }


def test_pictures_stand_in_the_page_with_what_was_said_about_them(run_folder):
    page = with_pictures(run_folder, sample("a red circle"), sample("a red <script>star"))
    assert page.count(f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"') == 2
    assert '<li class="right"><img' in page and '<li class="wrong"><img' in page
    assert "<b>a red circle</b><span>new pictures</span>" in page
    assert "<b>a red &lt;script&gt;star</b><span>new pictures; right: a red circle</span>" in page
    assert "<script>star" not in page


def test_shares_stand_beside_chance_and_the_blind_baseline(run_folder):
    page = with_pictures(run_folder, sample("a red circle"))
    assert "shapes named right" in page and ">90%<" in page
    for text in ("90% (50%–75%)", "13% (50%–75%)", "92% (50%–75%)", "12% (50%–75%)", "12.5%"):
        assert f">{text}</td>" in page
    assert "pairs never shown: What shape is it?" in page


def test_files_that_are_missing_or_not_the_runs_own_are_left_out_and_said(run_folder):
    (run_folder.parent / "secret.png").write_bytes(PNG)
    page = with_pictures(
        run_folder,
        sample("a", file="pictures/none.png"),
        sample("b", file="../secret.png"),
        sample("c", file="/etc/hostname"),
    )
    assert "3 picture files are missing or unreadable" in page
    assert "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAAC" not in page


def test_a_run_without_pictures_has_no_such_section(run_folder):
    page = build([run_folder]).read_text()
    assert 'id="pictures"' not in page and "named right" not in page


@pytest.mark.parametrize(
    "vision", [None, 3, {}, {"held_out": {"shape": 4}, "samples": [1]}, {"held_out": {"shape": {}}}]
)
def test_a_damaged_exam_does_not_cost_the_page(run_folder, vision):
    summary = json.loads((run_folder / "summary.json").read_text())
    (run_folder / "summary.json").write_text(json.dumps(summary | {"vision": vision}))
    assert "What it learnt" in build([run_folder]).read_text()


def test_a_run_that_was_only_scored_on_pictures_shows_the_curve(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        for step, nats in ((100, 0.5), (200, 0.25)):
            file.write(json.dumps({"kind": "eval_pictures", "step": step, "nats_per_token": nats}) + "\n")
        file.write(json.dumps({"kind": "eval_pictures", "step": 220}) + "\n")
    page = build([run_folder]).read_text()
    assert 'id="pictures"' in page and "Answers about pictures" in page and "named right" not in page
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert list(figures["figure-pictures-0"]["data"][0]["y"]) == [0.5, 0.25]
