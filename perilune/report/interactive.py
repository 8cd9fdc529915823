"""Draw a chart in a page: a figure in plotly's JSON form, as plain dictionaries.

No colour of paper, text or grid is set here: the page's script fills them in for the light and the dark theme, and
replaces the scale names "sequential" and "diverging" by colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from perilune.explain.chart import Bars, Chart, Heatmap, LineChart, Ridges, Series
from perilune.report.palette import KINDS, SERIES

Figure = dict[str, Any]


def figure(chart: Chart) -> Figure:
    """Return `{"data", "layout"}` (and "frames" for a heatmap with a slider); every number is finite or null."""
    if isinstance(chart, LineChart):
        return _lines(chart)
    if isinstance(chart, Heatmap):
        return _heatmap(chart)
    if isinstance(chart, Bars):
        return _bars(chart)
    return _ridges(chart)


def numbers(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """Plain floats of at most so many digits; what is not finite becomes None, since JSON has no NaN."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]


def _axis(label: str, log: bool = False) -> Figure:
    return {"title": {"text": label}, "type": "log" if log else "linear", "automargin": True, "zeroline": False}


def _faded(color: str, alpha: float) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _curve(series: Series, position: int) -> list[Figure]:
    color = SERIES[(position if series.color is None else series.color) % len(SERIES)]
    x = numbers(series.x)
    traces: list[Figure] = []
    if series.band is not None:
        low, high = series.band
        edge = {
            "type": "scatter",
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
            "x": x,
        }
        traces.append(edge | {"y": numbers(low)})
        traces.append(edge | {"y": numbers(high), "fill": "tonexty", "fillcolor": _faded(color, 0.18)})
    line = {"color": _faded(color, 0.3) if series.faint else color, "width": 1 if series.faint else 2.2}
    if series.style == "dash":
        line["dash"] = "dash"
    if series.style == "step":
        line["shape"] = "hv"
    few = sum(value is not None for value in numbers(series.y)) <= 40
    mode = "markers" if series.style == "dots" else "lines+markers" if few and not series.faint else "lines"
    traces.append({
        "type": "scatter", "mode": mode, "name": series.name, "x": x, "y": numbers(series.y), "line": line,
        "marker": {"color": color, "size": 6}, "showlegend": not series.faint,
        "hoverinfo": "skip" if series.faint else "x+y+name", "connectgaps": False,
    })  # fmt: skip
    return traces


def _level(values: Iterable[tuple[float, str]], log: bool, axis: str) -> tuple[list[Figure], list[Figure]]:
    """Shapes and labels of reference lines across the whole plot; annotations on a log axis take log10."""
    along, across = ("x", "y") if axis == "y" else ("y", "x")
    shapes, notes = [], []
    for value, label in values:
        shapes.append({
            "type": "line", f"{across}ref": across, f"{along}ref": f"{along} domain", f"{along}0": 0, f"{along}1": 1,
            f"{across}0": value, f"{across}1": value, "line": {"width": 1.2, "dash": "dot", "color": "muted"},
        })  # fmt: skip
        place = math.log10(value) if log else value
        note = {"text": label, "showarrow": False, "font": {"size": 11}, f"{across}ref": across, f"{across}": place}
        if axis == "y":
            notes.append(note | {"xref": "x domain", "x": 1, "xanchor": "right", "yanchor": "bottom"})
        else:
            notes.append(note | {"yref": "y domain", "y": 1, "yanchor": "bottom", "xanchor": "left", "textangle": 0})
    return shapes, notes


def _lines(chart: LineChart) -> Figure:
    data = [trace for position, series in enumerate(chart.series) for trace in _curve(series, position)]
    horizontals, notes_y = _level(chart.horizontals, chart.y_log, "y")
    verticals, notes_x = _level(chart.verticals, chart.x_log, "x")
    y = _axis(chart.y_label, chart.y_log)
    if chart.y_range is not None:
        y["range"] = [math.log10(v) if chart.y_log else v for v in chart.y_range]
    layout = {
        "xaxis": _axis(chart.x_label, chart.x_log), "yaxis": y, "hovermode": "x unified",
        "shapes": horizontals + verticals, "annotations": notes_y + notes_x, "height": 380,
        "showlegend": sum(not series.faint for series in chart.series) > 1,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _matrix(matrix: np.ndarray) -> list[list[float | None]]:
    return [numbers(row, digits=4) for row in np.asarray(matrix, dtype=float)]


def _heatmap(chart: Heatmap) -> Figure:
    low, high = chart.value_range()
    trace: Figure = {
        "type": "heatmap", "z": _matrix(chart.frames[-1][1]), "x": list(chart.columns), "y": list(chart.rows),
        "zmin": low, "zmax": high, "colorscale": "sequential" if chart.center is None else "diverging", "xgap": 1, "ygap": 1,
        "hoverongaps": False, "colorbar": {"title": {"text": chart.value_label, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": f"{chart.y_label} %{{y}}<br>{chart.x_label} %{{x}}<br>{chart.value_label} <b>%{{z:.3g}}</b><extra></extra>",
    }  # fmt: skip
    if chart.names:
        steps = [(number / len(chart.names), color) for number, color in enumerate(KINDS[: len(chart.names)])]
        trace["colorscale"] = [[edge, color] for low, color in steps for edge in (low, low + 1 / len(chart.names))]
        trace["colorbar"] |= {"tickvals": list(range(len(chart.names))), "ticktext": list(chart.names)}
    if chart.show_values:
        trace["texttemplate"] = "%{z:.2g}"
        trace["textfont"] = {"size": 11}
    slider = len(chart.frames) > 1
    layout: Figure = {
        "xaxis": _axis(chart.x_label) | {"type": "category", "showgrid": False},
        "yaxis": _axis(chart.y_label) | {"type": "category", "autorange": "reversed", "showgrid": False},
        "height": min(
            900, max(230, 110 + (30 if len(chart.rows) <= 12 else 20) * len(chart.rows)) + (90 if slider else 0)
        ),
    }
    result: Figure = {"data": [trace], "layout": layout}
    if slider:
        names = [label for label, _ in chart.frames]
        result["frames"] = [
            {"name": label, "data": [{"type": "heatmap", "z": _matrix(matrix)}]} for label, matrix in chart.frames
        ]
        layout["sliders"] = [{
            "active": len(names) - 1, "pad": {"t": 50}, "currentvalue": {"prefix": "", "xanchor": "right"},
            "steps": [
                {"label": name, "method": "animate", "args": [[name], {"mode": "immediate", "frame": {"duration": 0, "redraw": True},
                                                                      "transition": {"duration": 0}}]}
                for name in names
            ],
        }]  # fmt: skip
    return result


def _bars(chart: Bars) -> Figure:
    data = [
        {
            "type": "bar", "name": name, "x": list(chart.categories), "y": numbers(values),
            "marker": {"color": SERIES[position % len(SERIES)]},
            **({"texttemplate": "%{y:.3g}", "textposition": "outside", "cliponaxis": False} if chart.show_values else {}),
        }
        for position, (name, values) in enumerate(chart.groups)
    ]  # fmt: skip
    shapes, notes = _level(chart.horizontals, chart.y_log, "y")
    layout = {
        "xaxis": {"automargin": True, "type": "category"}, "yaxis": _axis(chart.y_label, chart.y_log), "barmode": "group",
        "bargap": 0.35, "height": 340, "showlegend": len(chart.groups) > 1, "shapes": shapes, "annotations": notes,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _ridges(chart: Ridges) -> Figure:
    centres, groups = chart.densities()
    x = numbers(centres)
    data: list[Figure] = []
    for position, (name, density, median) in enumerate(groups):
        color, base = SERIES[position % len(SERIES)], float(len(groups) - 1 - position)
        floor = {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "y": [base] * len(x),
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
        data.append(floor | {"showlegend": False})
        data.append({
            "type": "scatter", "mode": "lines", "name": name, "x": x, "y": numbers(base + 0.85 * density),
            "line": {"color": color, "width": 1.6}, "fill": "tonexty", "fillcolor": _faded(color, 0.3), "showlegend": False,
            "hovertemplate": f"{name}<br>%{{x:.3g}} {chart.x_label}<extra></extra>",
        })  # fmt: skip
        if math.isfinite(median):
            data.append({
                "type": "scatter", "mode": "markers+text", "x": [median], "y": [base], "text": [f"{median:.3g}"],
                "textposition": "top center", "marker": {"color": color, "size": 9, "symbol": "line-ns-open", "line": {"width": 2}},
                "showlegend": False, "hovertemplate": f"{name}<br>median %{{x:.3g}}<extra></extra>",
            })  # fmt: skip
    shapes, notes = _level(chart.marks, True, "x")
    layout = {
        "xaxis": _axis(chart.x_label, log=True),
        "yaxis": {
            "tickvals": list(range(len(groups) - 1, -1, -1)), "ticktext": [name for name, _, _ in groups], "automargin": True,
            "zeroline": False, "range": [-0.12, len(groups) + 0.02],
        },
        "hovermode": "closest", "height": 150 + 70 * len(groups), "shapes": shapes, "annotations": notes,
    }  # fmt: skip
    return {"data": data, "layout": layout}
