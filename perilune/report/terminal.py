"""Draw a chart with characters, for a terminal: Braille dots for curves, shades for matrices, blocks for bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perilune.explain.chart import Bars, Chart, Heatmap, LineChart, Ridges

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SHADES = " ·░▒▓█"
_MARKS = "●○◆◇▲△■□"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille bits by row and column of a cell


def text(chart: Chart, *, width: int = 80) -> str:
    """Return the chart as lines of at most `width` characters: title, picture, what to look for."""
    width = max(30, width)
    draw = {LineChart: _lines, Heatmap: _heatmap, Bars: _bars, Ridges: _ridges}[type(chart)]
    lines = [chart.title, *draw(chart, width), *_wrapped(chart.caption, width)]
    return "\n".join(line[:width].rstrip() for line in lines)


def _wrapped(sentence: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(sentence, width - 2, initial_indent="  ", subsequent_indent="  ")


def _plain(label: str) -> str:
    return label.split("<br>")[0]


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.3g}" if abs(value) < 10_000 else f"{value:.1e}"


def _scaled(values: Sequence[float], log: bool) -> np.ndarray:
    numbers = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(numbers > 0, np.log10(numbers), np.nan) if log else numbers


def _lines(chart: LineChart, width: int, height: int = 11) -> list[str]:
    """One Braille picture; each series has a letter in the legend, and markers show where curves differ."""
    xs = [_scaled(series.x, chart.x_log) for series in chart.series]
    ys = [_scaled(series.y, chart.y_log) for series in chart.series]
    levels = _scaled([value for value, _ in chart.horizontals], chart.y_log)
    x_low, x_high = _span(np.concatenate(xs) if xs else np.empty(0))
    y_low, y_high = _span(np.concatenate([*ys, levels]))
    if chart.y_range is not None:
        y_low, y_high = (math.log10(edge) for edge in chart.y_range) if chart.y_log else chart.y_range
    columns, left = width - 10, 9
    cells = np.zeros((height, columns), dtype=int)
    marks: dict[tuple[int, int], str] = {}

    def place(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        px = np.clip((x - x_low) / (x_high - x_low), 0, 1) * (columns * 2 - 1)
        py = np.clip(1 - (y - y_low) / (y_high - y_low), 0, 1) * (height * 4 - 1)
        return px, py

    shown = [(series, x, y) for series, x, y in zip(chart.series, xs, ys, strict=True) if not series.faint]
    for position, (series, x, y) in enumerate(shown):
        known = np.isfinite(x) & np.isfinite(y) & (y >= y_low) & (y <= y_high)
        px, py = place(np.where(known, x, 0.0), np.where(known, y, 0.0))
        for i in np.flatnonzero(known):
            points = 1
            if series.style != "dots" and i + 1 < len(x) and known[i + 1]:
                points = int(max(abs(px[i + 1] - px[i]), abs(py[i + 1] - py[i]))) + 1
            for t in np.linspace(0, 1, points, endpoint=points == 1) if points > 1 else (0.0,):
                j = min(i + 1, len(x) - 1)
                column, row = int(px[i] + t * (px[j] - px[i]) + 0.5), int(py[i] + t * (py[j] - py[i]) + 0.5)
                cells[min(row // 4, height - 1), min(column // 2, columns - 1)] |= _DOTS[row % 4][column % 2]
        if len(shown) > 1 and known.any():
            spots = np.flatnonzero(known)
            i = spots[int((position + 1) / (len(shown) + 1) * (len(spots) - 1))]
            marks[min(int(py[i] + 0.5) // 4, height - 1), min(int(px[i] + 0.5) // 2, columns - 1)] = _MARKS[
                position % len(_MARKS)
            ]
    rows = [[chr(0x2800 + cell) if cell else " " for cell in row] for row in cells]
    for level in levels[np.isfinite(levels)]:
        row = min(int(place(np.zeros(1), np.array([level]))[1][0] + 0.5) // 4, height - 1)
        rows[row] = ["┄" if character == " " else character for character in rows[row]]
    for (row, column), mark in marks.items():
        rows[row][column] = mark
    lines = []
    for number, row in enumerate(rows):
        at = y_high - (y_high - y_low) * (number / (height - 1))
        label = _short(10**at if chart.y_log else at) if number % 5 == 0 else ""
        lines.append(f"{label:>{left - 1}} ┤{''.join(row)}")
    ends = [_short(10**edge if chart.x_log else edge) for edge in (x_low, x_high)]
    lines.append(f"{'':>{left}}└{ends[0]}{chart.x_label:^{columns - len(ends[0]) - len(ends[1]) - 1}}{ends[1]}")
    legend = (
        [f"{_MARKS[i % len(_MARKS)]} {series.name}" for i, (series, _, _) in enumerate(shown)]
        if len(shown) > 1
        else [s.name for s, _, _ in shown]
    )
    legend += [f"┄ {label} ({_short(value)})" for value, label in chart.horizontals]
    return [f"  {chart.y_label}" + (" (log)" if chart.y_log else ""), *lines, *_packed(legend, width)]


def _span(values: np.ndarray) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _packed(items: Sequence[str], width: int) -> list[str]:
    """Items side by side, as many a line as fit."""
    lines, line = [], " "
    for item in items:
        if len(line) + len(item) + 2 > width and line.strip():
            lines.append(line)
            line = " "
        line += f" {item} "
    return [*lines, line] if line.strip() else lines


def _heatmap(chart: Heatmap, width: int) -> list[str]:
    """One row a line: numbers where they fit, shades otherwise; columns that do not fit are averaged in groups."""
    label, matrix = chart.frames[-1]
    matrix = np.asarray(matrix, dtype=float)
    low, high = chart.value_range()
    names = max(len(_plain(row)) for row in chart.rows) + 1
    room = width - names - 2
    cell = max([len(_plain(column)) for column in chart.columns] + [5]) + 1
    if chart.show_values and cell * len(chart.columns) <= room:
        lines = [" " * (names + 1) + "".join(f"{_plain(column):>{cell}}" for column in chart.columns)]
        lines += [
            f" {_plain(row):<{names}}"
            + "".join(f"{_short(value) if math.isfinite(value) else '':>{cell}}" for value in values)
            for row, values in zip(chart.rows, matrix, strict=True)
        ]
    else:
        columns = len(chart.columns)
        wide = max(1, min(4, room // columns))
        groups = np.array_split(np.arange(columns), min(columns, room // wide))
        lines = [
            f" {'':<{names}}{_plain(chart.columns[0])}{_plain(chart.columns[-1]):>{max(1, len(groups) * wide - len(_plain(chart.columns[0])))}}"
        ]
        for row, values in zip(chart.rows, matrix, strict=True):
            shades = ""
            for group in groups:
                some = values[group][np.isfinite(values[group])]
                share = (some.mean() - low) / (high - low) if some.size else math.nan
                level = int(np.clip(share, 0, 1) * (len(_SHADES) - 1) + 0.5) if math.isfinite(share) else 0
                shades += _SHADES[level] * wide
            lines.append(f" {_plain(row):<{names}}{shades}")
        scale = " ".join(
            f"{shade or ' '}{_short(low + (high - low) * i / (len(_SHADES) - 1))}" for i, shade in enumerate(_SHADES)
        )
        lines.append(f"  {chart.value_label}: {scale}")
    return [*lines, f"  {chart.x_label} →" + (f"   {label}" if label else "")]


def _bars(chart: Bars, width: int) -> list[str]:
    values = _scaled([value for _, group in chart.groups for value in group], chart.y_log)
    known = values[np.isfinite(values)]
    high = float(known.max()) if known.size else 1.0
    low = (
        min(0.0, float(known.min()))
        if known.size and not chart.y_log
        else (float(known.min()) - 1 if known.size else 0.0)
    )
    many = len(chart.groups) > 1
    names = min(width // 3, max(len(_plain(category)) for category in chart.categories))
    groups = max(len(name) for name, _ in chart.groups) if many else 0
    groups = min(groups, width // 4)
    room = max(4, width - names - groups - 14)
    lines = [f"  {chart.y_label}"]
    for i, category in enumerate(chart.categories):
        for j, (name, group) in enumerate(chart.groups):
            level = _scaled([group[i]], chart.y_log)[0]
            eighths = int(np.clip((level - low) / (high - low or 1), 0, 1) * room * 8) if math.isfinite(level) else 0
            bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
            head = _plain(category)[:names] if j == 0 else ""
            lines.append(f"  {head:<{names}} {name[:groups] if many else '':<{groups}} {bar} {_short(group[i])}")
    return [*lines, *_packed([f"{label}: {_short(value)}" for value, label in chart.horizontals], width)]


def _ridges(chart: Ridges, width: int) -> list[str]:
    centres, groups = chart.densities()
    names = min(width // 4, max(len(name) for name, _, _ in groups)) + 1
    room = width - names - 18
    lines = []
    for name, density, median in groups:
        columns = np.interp(np.linspace(0, len(density) - 1, room), np.arange(len(density)), density)
        bar = "".join(_EIGHTHS[int(value * 8 + 0.5)] for value in columns)
        lines.append(f" {name[: names - 1]:<{names}}{bar}  median {_short(median)}")
    ends = [_short(float(centres[0])), _short(float(centres[-1]))]
    lines.append(f" {'':<{names}}{ends[0]}{ends[1]:>{max(1, room - len(ends[0]))}}")
    return [
        *lines,
        f"  {chart.x_label} (log)",
        *_packed([f"{label}: {_short(value)}" for value, label in chart.marks], width),
    ]
