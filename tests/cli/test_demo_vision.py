"""The demo with pictures end to end on a little text, and the chat that looks at files."""

from __future__ import annotations

import base64
import json
import re

import pytest

from perilune.cli import chat
from perilune.cli.demo import DemoFlags, demo_config
from perilune.cli.main import main
from perilune.rundir import RunDir

Image = pytest.importorskip("PIL.Image", reason="the demo draws: it needs the extra vision")
pytest.importorskip("plotly", reason="the demo reports: it needs the extra report")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A demo of two steps: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text").mkdir()
    for n in range(30):
        lines = [f"def f{n}_{i}(a, b={i * n % 13}):\n    return a * {i % 7} + b" for i in range(120)]
        (folder / "text" / f"module{n}.py").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("perilune.cli.demo_vision.PICTURES", 6)
        assert main(["demo", "--vision", "--steps", "2", "--data", str(folder / "text"), "--json"]) == 0
    return folder / "runs" / "demo-vision"


def test_the_summary_has_the_numbers(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["train"]["steps"] == 2 and summary["train"]["images"] > 20
    assert summary["train"]["val_bits_per_byte"] > 0
    for part in ("held_out", "unseen"):
        for about in ("shape", "colour"):
            exam = summary["vision"][part][about]
            assert set(exam) == {"question", "chance", "generated", "blind_generated", "scored", "blind_scored"}
            assert exam["generated"]["total"] == 6 and exam["generated"]["low"] <= exam["generated"]["accuracy"]
            assert exam["chance"] == 1 / 8
    assert summary["report"].endswith("report.html")


def test_the_report_shows_the_pictures_inside_the_page(run):
    page = (run / "report.html").read_text()
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    files = sorted((run / "pictures").glob("*.png"))
    assert {path.read_bytes() for path in files} <= {base64.b64decode(each) for each in embedded}
    assert len(files) == 12 and 'id="pictures"' in page


def test_eval_asks_about_new_pictures(run, capsys):
    assert main(["eval", "--run", str(run), "--tokens", "300", "--pictures", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bits_per_byte"] > 0
    for part in ("held_out", "unseen"):
        assert told["pictures"][part]["colour"]["generated"]["total"] == 3
    assert main(["eval", "--run", str(run), "--tokens", "300", "--pictures", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("with another picture" in line for line in lines) == sum(map(len, told["pictures"].values()))
    assert main(["eval", "--run", str(run), "--pictures", "-1"]) == 2


def test_chat_looks_at_files(run, tmp_path, capsys):
    picture = Image.new("RGB", (300, 200), "white")
    picture.paste((220, 30, 30), (100, 50, 200, 150))
    for name in ("square.png", "square.jpg"):
        picture.save(tmp_path / name)
    call = ["chat", "--model", str(run), "--once", "what is this?", "--max-tokens", "4", "--json"]
    assert main([*call, "--image", str(tmp_path / "square.png")]) == 0
    one = json.loads(capsys.readouterr().out)
    assert main([*call, "--image", str(tmp_path / "square.png"), str(tmp_path / "square.jpg")]) == 0
    two = json.loads(capsys.readouterr().out)
    assert two["prompt_tokens"] > one["prompt_tokens"] + 10


def test_chat_names_files_that_are_no_pictures(run, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"hello")
    for name, words in (("bad.png", "bad.png is no image"), ("none.png", "there is no file")):
        assert main(["chat", "--run", str(run), "--image", str(tmp_path / name), "--once", "x"]) == 1
        assert words in capsys.readouterr().err
    assert main(["chat", "--run", str(run), "--image", "a.png", "--web"]) == 2


def test_slash_image_shows_a_file_with_the_next_message(monkeypatch, capsys, tmp_path):
    Image.new("RGB", (30, 30)).save(tmp_path / "a b.png")
    lines = iter([f"/image {tmp_path}/none.png", f"/image '{tmp_path}/a b.png'", "what is this?", "and?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    shown = []
    monkeypatch.setattr(chat, "_say", lambda session, text, images: shown.append((text, [p.name for p in images])))
    session = type("Session", (), {"engine": type("Engine", (), {"name": "eyes"})})
    assert chat._talk(session) == 0
    assert shown == [("what is this?", ["a b.png"]), ("and?", [])]
    assert "there is no file" in capsys.readouterr().err


def test_settings_of_the_demo():
    config = demo_config(DemoFlags(vision=True))
    assert config.data.vision.share > 0 and config.time_limit == 300 and config.model.vision is not None
    assert demo_config(DemoFlags()).time_limit == 240 and demo_config(DemoFlags()).model.vision is None
    assert RunDir.resolve("demo-vision").path.name == "demo-vision"
