"""The three drawings of a chart, and what a chart refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from perilune.explain.chart import Bars, Heatmap, LineChart, Ridges, Series
from perilune.explain.depth import running_sum_last, source_names
from perilune.report.figures import smooth, thin
from perilune.report.image import write_png
from perilune.report.interactive import figure, numbers
from perilune.report.terminal import text

WORDS = {"title": "a title", "caption": "What to look for."}


def charts():
    matrix = np.array([[0.0, 1.0, np.nan], [2.0, 1.0, 0.5]])
    return [
        LineChart(
            series=[Series(name="a", x=[1, 2, 3], y=[1.0, math.nan, 2.0], band=([0, 1, 1], [2, 2, 3])), Series(name="b", x=[1, 2], y=[3, 1], style="dots")],
            x_label="x", y_label="y", y_log=True, horizontals=[(1.5, "limit")], verticals=[(2, "here")], **WORDS,
        ),
        Heatmap(frames=[("one", matrix), ("two", matrix + 1)], rows=["r0", "r1"], columns=["c0", "c1", "c2"], x_label="c", y_label="r",
                value_label="v", center=1.0, show_values=True, **WORDS),
        Bars(categories=["p", "q"], groups=[("one", [1.0, 2.0]), ("two", [math.nan, 3.0])], y_label="n", **WORDS),
        Ridges(groups=[("fast", np.array([1.0, 2.0, 4.0])), ("none", np.array([np.nan, -1.0]))], x_label="tokens", marks=[(3.0, "mark")], **WORDS),
    ]  # fmt: skip


@pytest.mark.parametrize("chart", charts(), ids=lambda chart: type(chart).__name__)
def test_figures_are_json_and_valid_to_plotly(chart):
    go = pytest.importorskip("plotly.graph_objects", reason="the extra `report` is not installed")
    drawn = json.loads(json.dumps(figure(chart), allow_nan=False))
    for trace in drawn["data"]:  # the page's script puts colours in the place of these names
        if trace.get("colorscale") in ("sequential", "diverging"):
            trace["colorscale"] = [[0, "#000000"], [1, "#ffffff"]]
    for shape in drawn["layout"].get("shapes", []):
        shape["line"]["color"] = "#000000"
    go.Figure(drawn)


@pytest.mark.parametrize("chart", charts(), ids=lambda chart: type(chart).__name__)
def test_images_have_the_asked_size(chart, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    from PIL import Image

    with Image.open(write_png(chart, tmp_path / "deep" / "chart.png", width=6.0)) as image:
        assert image.width == 900
        assert len(set(image.convert("L").tobytes())) > 20, "the image is empty"


@pytest.mark.parametrize("chart", charts(), ids=lambda chart: type(chart).__name__)
@pytest.mark.parametrize("width", [40, 100])
def test_terminal_text_fits_its_width_and_names_everything(chart, width):
    drawn = text(chart, width=width)
    assert max(map(len, drawn.splitlines())) <= width
    assert "a title" in drawn
    names = {
        LineChart: ["a", "b", "limit"],
        Heatmap: ["r0", "r1", "c0", "c2"],
        Bars: ["p", "q", "one", "two"],
        Ridges: ["fast", "none"],
    }
    assert all(name in drawn for name in names[type(chart)])


def test_heatmap_limits_are_symmetric_about_the_center_and_never_empty():
    chart = charts()[1]
    low, high = chart.value_range()
    assert (low, high) == (-1.0, 3.0)
    flat = Heatmap(
        frames=[("", np.ones((1, 1)))], rows=["r"], columns=["c"], x_label="", y_label="", value_label="", **WORDS
    )
    assert flat.value_range() == (1.0, 2.0)


def test_a_heatmap_of_the_wrong_shape_is_refused():
    with pytest.raises(AssertionError, match="wrong"):
        Heatmap(
            title="wrong",
            caption="",
            frames=[("", np.ones((2, 2)))],
            rows=["r"],
            columns=["c"],
            x_label="",
            y_label="",
            value_label="",
        )


def test_ridges_peak_at_the_values_and_tell_the_median():
    values = 10.0 ** np.random.default_rng(0).normal(2.0, 0.2, size=4000)
    centres, [(name, density, median)] = Ridges(groups=[("g", values)], x_label="", **WORDS).densities()
    assert name == "g"
    assert density.max() == 1.0
    assert 80 < centres[density.argmax()] < 125
    assert median == pytest.approx(100, rel=0.05)


def test_numbers_have_no_nan_and_six_digits():
    assert numbers([1.23456789, math.nan, math.inf, 3]) == [1.23457, None, None, 3.0]


def test_smooth_is_the_mean_around_a_point_and_skips_gaps():
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0])
    assert smooth(values, 3).tolist() == [2.0, 2.0, 4.0, 6.0, 6.0]
    assert np.isnan(smooth(np.full(4, np.nan), 3)).all()


def test_thin_keeps_the_last_point_and_the_limit():
    x = np.arange(100_000.0)
    (kept,) = thin(x)
    assert len(kept) <= 1201
    assert kept[0] == 0
    assert kept[-1] == x[-1]


def test_the_running_sum_is_always_the_last_column():
    nan = np.nan
    weights = np.array([[1.0, nan, nan], [0.25, 0.75, nan], [0.2, 0.3, 0.5]])
    moved = running_sum_last(weights)
    assert np.array_equal(moved, [[nan, nan, 1.0], [0.25, nan, 0.75], [0.2, 0.3, 0.5]], equal_nan=True)
    assert source_names(4, 12, "block") == ["embedding", "layers 0–11", "layers 12–23", "running sum"]
    assert source_names(3, 12, "full") == ["embedding", "layer 0", "running sum"]
    assert source_names(3, None, "full_sublayer") == ["embedding", "output 1", "output 2"]
    assert source_names(1, 2, "block") == ["running sum"]
