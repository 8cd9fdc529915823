"""Draw a chart as a PNG with matplotlib, for documents; imported only when an image is asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from perilune.errors import CapacityError, RequestError
from perilune.explain.chart import Bars, Chart, Heatmap, LineChart, Ridges
from perilune.report.palette import DIVERGING, KINDS, SEQUENTIAL, SERIES

_STYLE = {
    "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e4e6ee", "grid.linewidth": 0.8, "axes.edgecolor": "#9aa0b4", "axes.labelcolor": "#3a3f52", "text.color": "#22263a",
    "xtick.color": "#5a6078", "ytick.color": "#5a6078", "axes.axisbelow": True, "figure.facecolor": "white", "legend.frameon": False,
}  # fmt: skip


def write_png(chart: Chart, path: Path, *, width: float = 8.0) -> Path:
    """Draw `chart` and write it to `path` at 150 dots per inch, `width` inches wide.

    Raises:
        RequestError: matplotlib is not installed, the path does not end in .png, or it cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise RequestError(f"{path} is not the name of a PNG file; give one that ends in .png")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("images need matplotlib, which is not installed; pip install 'perilune[report]'") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, _height(chart)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _DRAW[type(chart)](axes, chart)
        axes.set_title(chart.title, loc="left", fontsize=12, fontweight="bold", pad=14)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        except OSError as error:
            kind = CapacityError if error.errno == 28 else RequestError
            raise kind(f"cannot write {path}: {error.strerror}; choose another place") from error
    return path


def _height(chart: Chart) -> float:
    if isinstance(chart, Heatmap):
        return float(np.clip(1.3 + 0.34 * len(chart.rows), 2.4, 9.0))
    return 1.3 + 0.75 * len(chart.groups) if isinstance(chart, Ridges) else 3.9


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers on a log axis (0.1, 10, not powers), with a few between where the axis spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    close = high / low < 50
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if close else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _plain(label: str) -> str:
    return label.replace("<br>", "\n")


def _lines(axes: Any, chart: LineChart) -> None:
    shown = 0
    for position, series in enumerate(chart.series):
        color = SERIES[(position if series.color is None else series.color) % len(SERIES)]
        if series.band is not None:
            axes.fill_between(series.x, *series.band, color=color, alpha=0.18, linewidth=0)
        style = {"solid": "-", "step": "-", "dash": "--", "dots": "none"}[series.style]
        few = len(series.x) <= 40 and not series.faint
        axes.plot(series.x, series.y, linestyle=style, color=color, alpha=0.3 if series.faint else 1, linewidth=0.8 if series.faint else 1.9,
                  marker="o" if series.style == "dots" or few else "", markersize=3.5, label=None if series.faint else series.name,
                  drawstyle="steps-post" if series.style == "step" else "default")  # fmt: skip
        shown += not series.faint
    axes.set_xscale("log" if chart.x_log else "linear")
    axes.set_yscale("log" if chart.y_log else "linear")
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    for value, label in chart.horizontals:
        axes.axhline(value, color="#9aa0b4", linestyle=":", linewidth=1.2)
        axes.annotate(
            label,
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8.5,
            color="#5a6078",
        )
    for value, label in chart.verticals:
        axes.axvline(value, color="#c3c7d6", linewidth=1)
        axes.annotate(
            f" {label}",
            (value, 1),
            xycoords=("data", "axes fraction"),
            ha="left",
            va="bottom",
            fontsize=8,
            color="#5a6078",
        )
    if chart.x_log:
        _log_ticks(axes.xaxis, *axes.get_xlim())
    if chart.y_log:
        _log_ticks(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if shown > 1:
        axes.legend(fontsize=8.5, ncols=1 + shown // 6)


def _heatmap(axes: Any, chart: Heatmap) -> None:
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    low, high = chart.value_range()
    anchors = (SEQUENTIAL if chart.center is None else DIVERGING)["light"]
    if chart.names:
        colors = ListedColormap(KINDS[: len(chart.names)])
    else:
        colors = LinearSegmentedColormap.from_list("perilune", anchors, bad="#ffffff")
    label, matrix = chart.frames[-1]
    matrix = np.asarray(matrix, dtype=float)
    picture = axes.pcolormesh(np.arange(matrix.shape[1] + 1), np.arange(matrix.shape[0] + 1), np.ma.masked_invalid(matrix),
                              cmap=colors, vmin=low, vmax=high, edgecolors="white", linewidth=0.6 if matrix.size < 4000 else 0)  # fmt: skip
    axes.invert_yaxis()
    axes.grid(False)
    letters = max(len(line) for name in chart.columns for line in name.split("<br>"))
    every = max(1, -(-len(chart.columns) * (letters + 1) // 96))  # so many letters find room side by side
    axes.set_xticks(
        np.arange(0, len(chart.columns), every) + 0.5, [_plain(name) for name in chart.columns[::every]], fontsize=8
    )
    every = max(1, -(-len(chart.rows) // 40))
    axes.set_yticks(
        np.arange(0, len(chart.rows), every) + 0.5, [_plain(name) for name in chart.rows[::every]], fontsize=8.5
    )
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(f"{chart.x_label}   ({label})" if label else chart.x_label)
    bar = axes.figure.colorbar(picture, ax=axes, pad=0.015, aspect=18, fraction=0.04)
    bar.set_label(chart.value_label, fontsize=9)
    if chart.names:
        bar.set_ticks(range(len(chart.names)), labels=chart.names, fontsize=9)
        bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
    if chart.show_values:
        for (row, column), value in np.ndenumerate(matrix):
            if math.isfinite(value):
                dark = (
                    (value - low) / (high - low) > 0.42
                    if chart.center is None
                    else abs(value - chart.center) > 0.6 * (high - chart.center)
                )
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if dark else "#22263a",
                )


def _bars(axes: Any, chart: Bars) -> None:
    slots = np.arange(len(chart.categories))
    width = 0.7 / max(1, len(chart.groups))
    for position, (name, values) in enumerate(chart.groups):
        offset = (position - (len(chart.groups) - 1) / 2) * width
        drawn = axes.bar(slots + offset, values, width * 0.92, color=SERIES[position % len(SERIES)], label=name)
        if chart.show_values:
            axes.bar_label(drawn, fmt="{:.3g}", fontsize=8, padding=2)
    axes.set_xticks(slots, [_plain(name) for name in chart.categories], fontsize=9)
    axes.set_yscale("log" if chart.y_log else "linear")
    if chart.y_log:
        _log_ticks(axes.yaxis, *axes.get_ylim())
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(chart.y_label)
    for value, label in chart.horizontals:
        axes.axhline(value, color="#9aa0b4", linestyle=":", linewidth=1.2)
        axes.annotate(
            label,
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8.5,
            color="#5a6078",
        )
    if len(chart.groups) > 1:
        axes.figure.legend(loc="outside lower center", ncols=min(6, len(chart.groups)), fontsize=8.5)


def _ridges(axes: Any, chart: Ridges) -> None:
    centres, groups = chart.densities()
    for position, (_, density, median) in enumerate(groups):
        color, base = SERIES[position % len(SERIES)], len(groups) - 1 - position
        axes.fill_between(centres, base, base + 0.85 * density, color=color, alpha=0.3, linewidth=0)
        axes.plot(centres, base + 0.85 * density, color=color, linewidth=1.4)
        if math.isfinite(median):
            axes.plot([median, median], [base, base + 0.25], color=color, linewidth=2)
            axes.annotate(f" {median:.3g}", (median, base + 0.06), fontsize=8, color="#3a3f52")
    axes.set_xscale("log")
    _log_ticks(axes.xaxis, *axes.get_xlim())
    axes.set_yticks(range(len(groups) - 1, -1, -1), [name for name, _, _ in groups])
    axes.set_ylim(-0.12, len(groups) + 0.05)
    axes.set_xlabel(chart.x_label)
    for value, label in chart.marks:
        axes.axvline(value, color="#9aa0b4", linestyle=":", linewidth=1.2)
        axes.annotate(
            f" {label}",
            (value, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            fontsize=8.5,
            color="#5a6078",
        )


_DRAW = {LineChart: _lines, Heatmap: _heatmap, Bars: _bars, Ridges: _ridges}
