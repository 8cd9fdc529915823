"""The page: complete, self-contained, safe, and honest about what is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folder_writer import write_run

from perilune.cli import report as verb
from perilune.errors import RequestError
from perilune.report import build, images
from perilune.report.collect import collect

pytest.importorskip("plotly", reason="the extra `report` is not installed")
pytest.importorskip("jinja2", reason="the extra `report` is not installed")

FIGURES = ("Loss", "Bits per byte on held-out text", "Routing balance", "Routing load", "Selection bias", "Attention residual weights",
           "How long KDA channels remember", "Largest attention logit (MLA)", "Throughput", "Gradient norm and learning rates")  # fmt: skip
VOID = {"meta", "br", "hr", "img", "link", "input", "circle"}


class Reader(HTMLParser):
    """Collects attributes and text, and checks that elements close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


def embedded(html: str, key: str):
    return json.loads(re.search(rf'<script type="application/json" id="{key}">(.*?)</script>', html, re.S)[1])


def test_page_is_self_contained_complete_and_small(run_folder):
    path = build([run_folder])
    assert path == run_folder / "report.html"
    html = path.read_text("utf-8")
    assert path.stat().st_size < 6_000_000
    page = Reader(html)
    outside = [
        item
        for item in page.attributes
        if item[1] in ("src", "href", "srcset", "data", "action") and not item[2].startswith("#")
    ]
    assert outside == []
    style = "".join(page.text["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert ("meta", "http-equiv", "Content-Security-Policy") in page.attributes
    titles = [text.strip() for text in page.text["h3"]]
    assert titles == list(FIGURES)
    drawn = embedded(html, "figures")
    assert len(drawn) == len(FIGURES)
    assert set(drawn) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_page_shows_the_numbers_of_the_run(run_folder):
    html = build([run_folder]).read_text("utf-8")
    summary = json.loads((run_folder / "summary.json").read_text())
    body = html[: html.index('id="figures"')]
    for text in (f"{summary['train']['val_bits_per_byte']:.3f}", "2.310", "1.930", "1.820", "1.13", "1.060", ">87<", "zipfile", "a processor",
                 "perilune train --config", "quantile",
                 "Without balancing: 2.61", "And reversed?", "&lt;reversed&gt;", "argv: list[str]"):  # fmt: skip
        assert text in body, text
    losses = [
        figure
        for figure in embedded(html, "figures").values()
        if any(trace.get("name") == "held-out text" for trace in figure["data"])
    ]
    held = next(trace for trace in losses[0]["data"] if trace["name"] == "held-out text")
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    evals = [record for record in records if record["kind"] == "eval"]
    assert held["y"] == pytest.approx([record["nats"] / record["tokens"] for record in evals], rel=1e-5)


def test_text_of_the_model_cannot_break_the_page(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        evil = '</pre><script>alert(1)</script><img src="http://x/">\u2028'
        file.write(json.dumps({"kind": "sample", "step": 240, "prompt": "<b>", "text": evil}) + "\n")
    html = build([run_folder]).read_text("utf-8")
    page = Reader(html)
    assert "alert(1)" in "".join(page.text["pre"])
    assert not any(tag == "img" for tag, _, _ in page.attributes)
    assert "alert(1)" not in "".join(page.text["script"])


def test_names_inside_figures_cannot_end_their_script(run_folder):
    for path in (run_folder / "probes").glob("*.npz"):
        with np.load(path) as archive:
            arrays = dict(archive)
        arrays["attnres_sites"] = np.array(["</script ><!--<script ", *arrays["attnres_sites"][1:]])
        np.savez(path, **arrays)
    html = build([run_folder]).read_text("utf-8")
    Reader(html)
    start = html.index('id="figures">') + len('id="figures">')
    assert "<" not in html[start : html.index("</script>", start)], (
        "an element or a comment could begin inside the data"
    )
    rows = [
        trace["y"]
        for figure in embedded(html, "figures").values()
        for trace in figure["data"]
        if trace["type"] == "heatmap"
    ]
    assert any("</script >" in row[0] for row in rows)


def test_heatmap_slider_holds_every_probe_and_loads_are_relative(run_folder):
    drawn = embedded(build([run_folder]).read_text("utf-8"), "figures")
    load = next(
        figure
        for figure in drawn.values()
        if figure["data"][0].get("colorbar", {}).get("title", {}).get("text") == "load ÷ mean"
    )
    assert [frame["name"] for frame in load["frames"]] == ["step 80", "step 160", "step 240"]
    for frame in load["frames"]:
        assert np.mean(frame["data"][0]["z"], axis=1) == pytest.approx(1.0, rel=1e-4)


def test_a_young_run_gets_a_page_with_notes(tmp_path):
    folder = write_run(tmp_path / "young")
    for name in ("summary.json", "environment.json", "split.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "probes")
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:3]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "st')
    page = Reader(build([folder]).read_text("utf-8"))
    notes = " ".join(page.text["p"])
    for words in ("no summary.json", "no probes", "environment.json is missing"):
        assert words in notes, words
    assert [text.strip() for text in page.text["h3"]] == [
        "Loss",
        "Routing balance",
        "Throughput",
        "Gradient norm and learning rates",
    ]


def test_a_run_that_only_has_a_config_or_only_metrics(tmp_path):
    first = write_run(tmp_path / "config-only")
    (first / "metrics.jsonl").unlink()
    (first / "summary.json").unlink()
    shutil.rmtree(first / "probes")
    assert "no training step yet" in build([first]).read_text("utf-8")
    second = write_run(tmp_path / "metrics-only")
    (second / "config.toml").unlink()
    assert "config.toml cannot be read" in build([second]).read_text("utf-8")


def test_not_finite_losses_leave_gaps_and_are_said(run_folder):
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["kind"] == "train" and record["step"] >= 200:
            record["loss"] = float("nan")
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    html = build([run_folder]).read_text("utf-8")
    assert "not finite from step 200" in html
    loss = next(iter(embedded(html, "figures").values()))
    assert loss["data"][0]["y"][198] is not None
    assert loss["data"][0]["y"][199] is None


def test_damaged_files_are_named_and_the_rest_is_shown(run_folder):
    (run_folder / "probes" / "step-00000080.npz").write_bytes(b"PK\x03\x04 cut short")
    (run_folder / "summary.json").write_text("{")
    (run_folder / "split.json").write_text("[1, 2]")
    page = Reader(build([run_folder]).read_text("utf-8"))
    notes = " ".join(page.text["p"])
    assert "step-00000080.npz cannot be read" in notes
    assert "summary.json cannot be read" in notes
    assert "Routing load" in [text.strip() for text in page.text["h3"]]


def test_a_resumed_run_shows_each_step_once(run_folder):
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    again = json.loads(lines[9]) | {"loss": 99.0}
    (run_folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    run = collect(run_folder)
    steps = [record["step"] for record in run.train]
    assert steps == sorted(set(steps))
    assert run.train[steps.index(again["step"])]["loss"] == 99.0


def test_several_runs_are_compared_with_the_spread_between_seeds(tmp_path):
    folders = [
        write_run(tmp_path / f"{balancer}-{seed}", seed=seed, floor=floor, balancer=balancer)
        for balancer, seed, floor in (("none", 0, 2.30), ("none", 1, 2.34), ("quantile", 0, 2.10), ("quantile", 1, 2.12))
    ]  # fmt: skip
    path = build(folders, tmp_path / "pages" / "all.html", compare=True)
    page = Reader(path.read_text("utf-8"))
    cells = "".join(page.text["td"])
    assert "moe.balancer=none" in cells
    headings = [text.strip() for text in page.text["h3"]]
    assert headings == ["Training loss", "Held-out bits per byte", "Final bits per byte"]
    assert f"{np.std([2.30 / 1.386, 2.34 / 1.386], ddof=1):.4f}" in cells
    both = Reader(build(folders[:2], tmp_path / "two.html").read_text("utf-8"))
    assert headings[0] in [text.strip() for text in both.text["h3"]]
    assert len(both.ids) == len(set(both.ids))


def test_a_folder_of_runs_stands_for_them_and_stray_files_are_left_out(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "ablation" / f"block-{seed}", seed=seed)
    (tmp_path / "ablation" / "ablation.json").write_text("{}")
    whole = build([tmp_path / "ablation"], compare=True)
    assert whole == tmp_path / "ablation" / "comparison.html"
    globbed = build(sorted(tmp_path.glob("ablation/*")), tmp_path / "g.html", compare=True).read_text("utf-8")
    assert "ablation.json is not a run folder" in globbed
    assert "block-0" in globbed


def test_an_unbalanced_run_beside_the_demo_is_drawn(run_folder):
    write_run(run_folder / "without_balancing", steps=60, balancer="none")
    drawn = embedded(build([run_folder]).read_text("utf-8"), "figures")
    names = [trace.get("name") for figure in drawn.values() for trace in figure["data"]]
    assert "without balancing, mean of layers" in names


def test_what_is_no_run_is_refused_with_what_to_do(tmp_path, monkeypatch, run_folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="no run in runs/nothing.*is not a folder.*train --run"):
        build(["nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="neither config.toml nor metrics.jsonl.*moonrise"):
        build([tmp_path / "empty"])
    with pytest.raises(RequestError, match="no run was named"):
        build([])
    with pytest.raises(RequestError, match="at least two"):
        build([run_folder], compare=True)
    with pytest.raises(RequestError, match="is a folder"):
        build([run_folder], tmp_path)


def test_images_are_written_for_the_parts_that_exist(run_folder, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    names = {path.name for path in images(run_folder, tmp_path / "png")}
    assert {"loss.png", "routing-load.png", "attnres-weights.png", "kda-half-lives.png"} <= names
    shutil.rmtree(run_folder / "probes")
    assert "attnres-weights.png" not in {path.name for path in images(run_folder, tmp_path / "fewer")}


def test_verb_prints_one_json_object(run_folder, tmp_path, capsys):
    assert verb.run([str(run_folder), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(tmp_path / "r.html")
    assert told["bytes"] == (tmp_path / "r.html").stat().st_size


def test_the_report_needs_no_torch(run_folder):
    code = f"import sys; from perilune.report import build; build([{str(run_folder)!r}]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_browser_draws_every_figure(run_folder, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    path = build([run_folder])
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
               "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1000"]  # fmt: skip
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", path.as_uri() + "#theme=dark"],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert f'data-drawn="{len(FIGURES)}"' in done.stdout
    assert 'data-theme="dark"' in done.stdout
    assert done.stdout.count("main-svg") >= len(FIGURES)


def test_many_probes_are_thinned_to_a_bounded_page(run_folder):
    rng = np.random.default_rng(0)
    for step in range(250, 400):
        np.savez(
            run_folder / "probes" / f"step-{step:08d}.npz",
            routing_counts=rng.poisson(100, size=(24, 64)),
            routing_layers=np.arange(24),
        )
    path = build([run_folder])
    assert path.stat().st_size < 6_000_000
    drawn = embedded(path.read_text("utf-8"), "figures")
    load = next(
        figure
        for figure in drawn.values()
        if figure["data"][0].get("colorbar", {}).get("title", {}).get("text") == "load ÷ mean"
    )
    names = [frame["name"] for frame in load["frames"]]
    assert 10 < len(names) <= 40
    assert (names[0], names[-1]) == ("step 250", "step 399")
