"""What a picture shows, apart from how it is drawn.

A chart is plain data: numbers, labels, units and one sentence that says what to look for. `perilune.report` draws the
same values three times: in a page (`interactive`), as an image (`image`) and in a terminal (`terminal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: `x` and `y` of equal length; NaN in `y` leaves a gap.

    Attributes:
        style: "solid" | "dash" | "dots" (markers only) | "step".
        color: index into the palette; None = the series' own position.
        faint: draw it thin and pale, behind the others (raw values under a smoothed curve).
        band: lower and upper edge around the curve, drawn as a shade.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "solid"
    color: int | None = None
    faint: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y), f"series {self.name!r}: {len(self.x)} x values, {len(self.y)} y values"


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Curves over a common x axis, with named horizontal and vertical lines.

    Attributes:
        y_range: fixed limits of y; None = from the data.
    """

    title: str
    caption: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    horizontals: Sequence[tuple[float, str]] = ()
    verticals: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A matrix of values, or several of the same shape with a slider between them.

    Attributes:
        frames: (label, matrix `[rows, columns]`), oldest first; the last one is shown. NaN cells stay empty.
        rows, columns: labels of the two axes.
        center: value drawn in the neutral colour (a diverging scale); None = a sequential scale.
        limits: value range of the colours; None = from all frames.
        names: of the values 0, 1, 2, …, which are then kinds of things and get colours of their own.
        show_values: print the number in each cell.
    """

    title: str
    caption: str
    frames: Sequence[tuple[str, np.ndarray]]
    rows: Sequence[str]
    columns: Sequence[str]
    x_label: str
    y_label: str
    value_label: str
    center: float | None = None
    limits: tuple[float, float] | None = None
    names: Sequence[str] = ()
    show_values: bool = False

    def __post_init__(self) -> None:
        assert self.frames, f"heatmap {self.title!r} has no frame"
        for label, matrix in self.frames:
            shape = (len(self.rows), len(self.columns))
            assert np.shape(matrix) == shape, (
                f"heatmap {self.title!r}, frame {label!r}: {np.shape(matrix)} is not {shape}"
            )

    def value_range(self) -> tuple[float, float]:
        """Limits of the colour scale, finite and of non-zero width; symmetric about `center` where there is one."""
        if self.limits is not None:
            return self.limits
        if self.names:
            return -0.5, len(self.names) - 0.5
        values = np.concatenate([np.asarray(matrix, dtype=float).ravel() for _, matrix in self.frames])
        values = values[np.isfinite(values)]
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        if self.center is not None:
            reach = max(high - self.center, self.center - low, 1e-9)
            return self.center - reach, self.center + reach
        return (low, high) if high > low else (low, low + 1.0)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Grouped bars: one value per category for each named group."""

    title: str
    caption: str
    categories: Sequence[str]
    groups: Sequence[tuple[str, Sequence[float]]]
    y_label: str
    y_log: bool = False
    show_values: bool = True
    horizontals: Sequence[tuple[float, str]] = ()

    def __post_init__(self) -> None:
        for name, values in self.groups:
            assert len(values) == len(self.categories), f"bars {self.title!r}, group {name!r}: {len(values)} values"


@dataclass(frozen=True, kw_only=True)
class Ridges:
    """Distributions on one log axis, one ridge each: densities of log10(value), with the median marked."""

    title: str
    caption: str
    groups: Sequence[tuple[str, np.ndarray]]
    x_label: str
    bins: int = 48
    marks: Sequence[tuple[float, str]] = ()
    span: tuple[float, float] | None = field(default=None)

    def densities(self) -> tuple[np.ndarray, list[tuple[str, np.ndarray, float]]]:
        """Return (bin centres `[bins]`, [(name, density scaled to a highest value of 1, median)]).

        Values that are not finite and positive are left out; a group of nothing else has density 0 and median NaN.
        """
        kept = [(name, _positive(values)) for name, values in self.groups]
        everything = np.concatenate([values for _, values in kept] + [np.empty(0)])
        if self.span is not None:
            low, high = (math.log10(edge) for edge in self.span)
        elif everything.size:
            low, high = np.log10(everything.min()) - 0.15, np.log10(everything.max()) + 0.15
        else:
            low, high = 0.0, 1.0
        edges = np.linspace(low, high, self.bins + 1)
        centres = 10 ** ((edges[:-1] + edges[1:]) / 2)
        width = 2.0  # in bins: smooths a few hundred values without hiding a second mode
        offsets = np.arange(-6, 7)
        kernel = np.exp(-0.5 * (offsets / width) ** 2)
        kernel /= kernel.sum()
        result = []
        for name, values in kept:
            counts, _ = np.histogram(np.log10(values), bins=edges)
            density = np.convolve(counts.astype(float), kernel, mode="same")
            peak = density.max()
            result.append(
                (name, density / peak if peak else density, float(np.median(values)) if values.size else math.nan)
            )
        return centres, result


def _positive(values: np.ndarray) -> np.ndarray:
    flat = np.asarray(values, dtype=float).ravel()
    return flat[np.isfinite(flat) & (flat > 0)]


Chart = LineChart | Heatmap | Bars | Ridges
