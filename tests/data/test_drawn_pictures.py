"""Drawn pictures: pure functions of their number, never in two parts, and what they say is what the pixels show."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from perilune.config.train import DRAWN
from perilune.data.drawn import KINDS, Catalogue, kinds
from perilune.data.drawn.canvas import COLOURS
from perilune.data.drawn.fonts import BUILT_IN, emoji_font, text_fonts
from perilune.data.drawn.objects import SHAPES, unseen_pair
from perilune.data.drawn.parts import PARTS, part
from perilune.errors import ConfigError

pytest.importorskip("PIL", reason="pictures need the extra vision")

PLAIN = [name for name in KINDS if name != "emoji"]


def catalogue(*names: str, side: int = 56, seed: int = 0) -> Catalogue:
    return Catalogue(kinds(names), side, seed)


def digest(drawing) -> str:
    content = json.dumps([drawing.attributes, drawing.captions], sort_keys=True).encode() + drawing.image.tobytes()
    return hashlib.sha256(content).hexdigest()


def pixels(drawing) -> np.ndarray:
    """Float RGB `[H, W, 3]`."""
    return np.asarray(drawing.image).astype(float)


def painted(drawing) -> np.ndarray:
    """bool `[H, W]`: pixels that are nearer to the paint than to the paper."""
    rgb, paper = pixels(drawing), np.array(drawing.attributes["paper"], dtype=float)
    paint = np.array(drawing.attributes.get("paint") or drawing.attributes["object"]["paint"], dtype=float)
    return np.linalg.norm(rgb - paint, axis=-1) < np.linalg.norm(rgb - paper, axis=-1)


def test_the_settings_name_every_kind():
    assert DRAWN == KINDS


def test_a_picture_is_a_function_of_seed_part_and_number():
    """Also in a process with other hashes, drawn alone instead of in a row."""
    mixed = catalogue(*PLAIN)
    first = {(name, n): digest(mixed.draw(n, name)) for name in ("train", "held_out") for n in range(2 * len(PLAIN))}
    again = {key: digest(catalogue(*PLAIN).draw(key[1], key[0])) for key in reversed(first)}
    assert first == again
    code = (
        "import sys; sys.path.insert(0, 'tests/data'); from test_drawn_pictures import *;"
        "print([digest(catalogue(*PLAIN).draw(n)) for n in range(12)])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": "."}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert eval(out.stdout) == [first["train", n] for n in range(12)]
    assert digest(catalogue("shape", seed=1).draw(0)) != digest(catalogue("shape").draw(0))


@pytest.mark.parametrize("name", PLAIN)
def test_no_picture_is_in_two_parts(name):
    kind = kinds([name])[0]
    seen = {}
    for which in PARTS:
        for n in range(24):
            drawing = catalogue(name).draw(n, which)
            assert part(kind, drawing.attributes) == which
            seen.setdefault(json.dumps(drawing.attributes, sort_keys=True), set()).add(which)
    assert all(len(parts) == 1 for parts in seen.values())
    combinations = {
        which: {kind.combination(catalogue(name).draw(n, which).attributes) for n in range(24)} for which in PARTS
    }
    assert not combinations["unseen"] & (combinations["train"] | combinations["held_out"])


def test_unseen_pairs_leave_every_shape_and_colour_its_share():
    pairs = [(s, c) for s, c in itertools.product(SHAPES, COLOURS) if unseen_pair(s, c)]
    assert sorted(s for s, _ in pairs) == sorted(SHAPES) and sorted(c for _, c in pairs) == sorted(COLOURS)
    for name in ("shape", "shapes", "boxes", "points"):
        for n in range(60):
            attributes = catalogue(name).draw(n).attributes
            things = attributes.get("objects") or [attributes["object"]]
            assert not any((t["shape"], t["colour"]) in pairs for t in things)


def test_the_named_colour_is_the_one_that_is_seen():
    names, values = list(COLOURS), np.array(list(COLOURS.values()), dtype=float)
    for n in range(100):
        drawing = catalogue("shape").draw(n)
        mean = pixels(drawing)[painted(drawing)].mean(axis=0)
        assert names[int(np.linalg.norm(values - mean, axis=1).argmin())] == drawing.attributes["object"]["colour"]


def test_shapes_fill_their_box_as_their_geometry_says():
    """Share of the bounding box that is painted: circle π/4, square 1, triangle 1/2, diamond 1/2, ring π/4 (1 - 0.58²)."""
    expected = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5, "diamond": 0.5, "ring": np.pi / 4 * (1 - 0.58**2)}
    seen = set()
    for n in range(200):
        drawing = catalogue("shape", side=112).draw(n)
        thing = drawing.attributes["object"]
        if thing["shape"] not in expected or abs(thing["turn"]) > 1.5:
            continue
        rows, columns = np.nonzero(painted(drawing))
        area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        assert len(rows) / area == pytest.approx(expected[thing["shape"]], abs=0.07), thing
        seen.add(thing["shape"])
    assert seen == set(expected)


def test_boxes_and_points_are_those_of_the_pixels_in_both_conventions():
    checked = 0
    for name in ("boxes", "points"):
        for n in range(60):
            drawing = catalogue(name).draw(n)
            if len(drawing.attributes["objects"]) == 2:
                continue
            thing = drawing.attributes["objects"][0]
            one = dict(drawing.attributes, object=thing)
            rows, columns = np.nonzero(painted(type("D", (), {"image": drawing.image, "attributes": one})))
            box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], dtype=float)
            truth = box if name == "boxes" else np.array([box[0] + box[2], box[1] + box[3]]) / 2
            sides = np.tile([drawing.image.width, drawing.image.height], len(truth) // 2)
            answers = {q.about: np.array([float(v) for v in q.answer.split()]) for q in drawing.questions}
            assert answers["pixels"] == pytest.approx(truth, abs=1.5)
            assert answers["unit"] == pytest.approx(truth / sides, abs=1.5 / sides.min() + 0.005)
            assert 0.0 <= answers["unit"].min() and answers["unit"].max() <= 1.0
            checked += 1
    assert checked > 40


def test_two_objects_lie_as_the_caption_says():
    for n in range(60):
        drawing = catalogue("shapes").draw(n)
        first, second = drawing.attributes["objects"]
        words = drawing.captions[0]
        assert first["shape"] != second["shape"] and first["colour"] != second["colour"]
        if " above " in words:
            assert first["y"] + first["radius"] < second["y"] + second["radius"] and first["y"] < second["y"]
        else:
            assert " to the left of " in words and first["x"] < second["x"]
        assert words.startswith(("a ", "an ")) and first["shape"] in words.split(" above ")[0].split(" to ")[0]


def test_bars_are_as_high_as_their_values():
    for n in range(60):
        drawing = catalogue("bars", side=120).draw(n)
        values = np.array(drawing.attributes["values"])
        mask = painted(drawing) & (np.abs(pixels(drawing) - drawing.attributes["paint"]).sum(-1) < 12)
        heights = mask.sum(axis=0)
        wide = np.flatnonzero(heights > 3)
        groups = np.split(wide, np.flatnonzero(np.diff(wide) > 1) + 1)
        assert len(groups) == len(values)
        measured = np.array([np.median(heights[group]) for group in groups])
        assert np.allclose(measured / measured.max(), values / values.max(), atol=0.06)
        highest = next(q.answer for q in drawing.questions if q.about == "highest")
        assert highest == "ABCDE"[int(measured.argmax())]


def test_the_coloured_cell_is_where_the_caption_says():
    for n in range(80):
        drawing = catalogue("grid", side=100).draw(n)
        a = drawing.attributes
        rows, columns = np.nonzero(np.abs(pixels(drawing) - a["paint"]).sum(-1) < 12)
        row = int(rows.mean() / drawing.image.height * a["rows"]) + 1
        column = int(columns.mean() / drawing.image.width * a["columns"]) + 1
        assert f"at row {row} column {column}" in drawing.captions[0]


def test_words_are_inked_inside_the_picture():
    for n in range(60):
        drawing = catalogue("words").draw(n)
        rgb, ink = pixels(drawing), np.array(drawing.attributes["ink"], dtype=float)
        near = np.linalg.norm(rgb - ink, axis=-1) < np.linalg.norm(rgb - np.array(drawing.attributes["paper"]), axis=-1)
        assert 0.005 < near.mean() < 0.7
        assert drawing.questions[1].answer == drawing.attributes["text"]


def test_sizes_and_turns_of_the_kinds():
    both = catalogue("shape", "grid", "shape")
    assert [both.draw(n).kind for n in range(6)] == ["shape", "grid", "shape"] * 2
    sizes = np.array([catalogue("shape").draw(n).image.size for n in range(200)])
    assert sizes.min() >= 56 and sizes.max() <= 3 * 56 * 4 / 3 + 1
    assert 0.2 < (sizes[:, 0] != sizes[:, 1]).mean() < 0.45
    fingerprints = {
        catalogue("shape").fingerprint,
        catalogue("grid").fingerprint,
        catalogue("shape", side=70).fingerprint,
    }
    assert len(fingerprints) == 3


def test_emoji_need_a_coloured_font_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr("perilune.data.drawn.catalogue.emoji_font", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert [kind.name for kind in kinds(["emoji", "shape"])] == ["shape"]
    assert "no font with coloured emoji" in caplog.text
    with pytest.raises(ConfigError, match="no kind of picture is left"):
        kinds(["emoji"])


@pytest.mark.skipif(emoji_font() is None, reason="no font with coloured emoji (fonts-noto-color-emoji) is installed")
def test_emoji_are_drawn_in_colour_and_named():
    made = catalogue("emoji")
    drawings = [made.draw(n) for n in range(12)]
    assert len({drawing.captions[0] for drawing in drawings}) > 8
    for drawing in drawings:
        assert (np.ptp(pixels(drawing).reshape(-1, 3), axis=1) > 24).mean() > 0.02


def test_mistakes_and_fonts():
    assert text_fonts()[0] == BUILT_IN
    with pytest.raises(ConfigError, match="no kind of picture 'cat'; allowed: shape"):
        kinds(["cat"])
