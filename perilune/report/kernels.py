"""Pictures of kernels' speed, from the rows of `perilune bench kernels` and `perilune bench train`.

    python -m perilune.report.kernels ROWS.jsonl FOLDER

`roofline.png` puts every row's time beside what the machine's own copy and matrix product would need for its bytes and
operations, measured in the same process. `ratio-*.png` show our speed over a peer's, a picture for each kind of shape.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perilune.errors import RequestError
from perilune.explain.chart import Bars, Chart, LineChart, Series
from perilune.report.image import write_png

_SIZE = re.compile(r"[A-Znm]\d+")
_SAME = ("bf16", "d128")  # in every name of a picture: says nothing there
_MOST = 12  # bars' labels that fit side by side

Row = dict[str, Any]


def draw(rows: Path, folder: Path, prefix: str = "") -> list[Path]:
    """Draw what a results file has data for; the newest row of each name counts, for ratios the newest that had a peer.

    Args:
        rows: a .jsonl file of benchmark rows.
        folder: to write to.
        prefix: of the pictures' names.

    Raises:
        RequestError: matplotlib is missing, or the file does not hold benchmark rows.
    """
    found = _read(rows)
    pictures: dict[str, Chart | None] = {"roofline.png": roofline(_newest(found))}
    compared = _newest([row for row in found if row["ratio"] is not None])
    pictures |= {f"ratio-{name}.png": chart for name, chart in ratios(compared).items()}
    return [write_png(chart, folder / f"{prefix}{name}") for name, chart in pictures.items() if chart is not None]


def _read(path: Path) -> list[Row]:
    keys = ("name", "shape", "ours_ms", "peer", "ratio", "bound_ms", "extra", "device")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [{key: row[key] for key in keys} for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} does not hold benchmark rows: {error!r}; give a file of benchmarks/results"
        ) from None


def _newest(rows: Sequence[Row]) -> list[Row]:
    return list({row["name"]: row for row in rows}.values())


def _limit(row: Row) -> str:
    """What the row's bound comes from: "copy" or "matrix product"; "" if the row does not say."""
    extra = row["extra"]
    copy = extra.get("bytes", 0.0) / extra.get("copy_bytes_per_second", math.inf)
    product = extra.get("flops", 0.0) / extra.get("matmul_flops_per_second", math.inf)
    return "" if copy == product == 0 else ("copy" if copy >= product else "matrix product")


def roofline(rows: Sequence[Row]) -> LineChart | None:
    """Measured time over the time of the bound, both logarithmic: the roof is the diagonal."""
    known = [row for row in rows if row["bound_ms"]]
    if not known:
        return None
    bounds = [row["bound_ms"] for row in known]
    line = np.geomspace(0.7 * min(bounds), 1.4 * max(bounds), 64)
    series = [Series(name="the bound itself", x=line, y=line, color=3)]
    series.append(Series(name="twice the bound", x=line, y=2 * line, style="dash", color=3))
    for color, limit in enumerate(("copy", "matrix product", "")):
        chosen = [row for row in known if _limit(row) == limit]
        if chosen:
            name = f"bound by {limit}" if limit else "bound by copy or matrix product"
            x, y = [row["bound_ms"] for row in chosen], [row["ours_ms"] for row in chosen]
            series.append(Series(name=name, x=x, y=y, style="dots", color=color))
    return LineChart(
        title=f"Kernels beside their bounds, {known[-1]['device']}",
        caption=f"{_ceilings(known)} A point on the solid line would take no longer than that.",
        series=series, x_label="bound: bytes at copy speed or operations at matmul speed, ms", y_label="measured, ms",
        x_log=True, y_log=True,
    )  # fmt: skip


def _ceilings(rows: Sequence[Row]) -> str:
    copies = [row["extra"]["copy_bytes_per_second"] for row in rows if "copy_bytes_per_second" in row["extra"]]
    products = [row["extra"]["matmul_flops_per_second"] for row in rows if "matmul_flops_per_second" in row["extra"]]
    words = [f"copies {max(copies) / 1e12:.2f} TB/s"] if copies else []
    words += [f"multiplies {max(products) / 1e12:.0f} TFLOP/s"] if products else []
    return (
        f"The machine {' and '.join(words)}." if words else "Bounds are from the machine's own copy and matrix product."
    )


def ratios(rows: Sequence[Row]) -> dict[str, Bars]:
    """Our speed over the peer's, by picture: rows of a family whose names give the same sizes share one."""
    pictures: dict[str, dict[str, dict[str, float]]] = {}
    peers: dict[str, set[str]] = {}
    for row in rows:
        family, *words = (word for word in row["name"].split("_") if word not in _SAME)
        sizes = [word for word in words if _SIZE.fullmatch(word)]
        rest = " ".join(word for word in words if word not in sizes)
        letters = "".join(word[0] for word in sizes)
        picture = f"{family}-{letters}" if sizes else family
        category, group = ("<br>".join(sizes), rest) if sizes else (rest.replace(" ", "<br>"), "")
        pictures.setdefault(picture, {}).setdefault(group, {})[category] = row["ratio"]
        peers.setdefault(picture, set()).add(row["peer"])
    charts = {}
    for picture, groups in pictures.items():
        categories = list(dict.fromkeys(category for values in groups.values() for category in values))
        for part in range(0, len(categories), _MOST):
            shown = categories[part : part + _MOST]
            bars = [(name, [values.get(category, math.nan) for category in shown]) for name, values in groups.items()]
            only = next(iter(groups)) if len(groups) == 1 else ""
            name = picture if part == 0 else f"{picture}-{part // _MOST + 1}"
            charts[name] = Bars(
                title=f"Speed over the peer's: {picture.split('-')[0]} {only}".rstrip(),
                caption=f"Peers: {'; '.join(sorted(peers[picture]))}. Both in one process; above 1 ours is faster.",
                categories=shown, groups=bars, y_label="times the peer's speed", show_values=len(shown) * len(bars) <= 24,
                horizontals=[(1.0, "")],
            )  # fmt: skip
    return charts


if __name__ == "__main__":
    for drawn in draw(Path(sys.argv[1]), Path(sys.argv[2]), "kernels-"):
        print(drawn)
