"""Pictures of kernels' speed from benchmark rows: which row counts, what bounds it, which shapes share a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perilune.errors import RequestError
from perilune.report import kernels

CEILINGS = {"copy_bytes_per_second": 4e12, "matmul_flops_per_second": 7e14}


def row(name: str, ours: float, ratio: float | None, **extra: float) -> dict:
    return {
        "name": name, "shape": "as named", "ours_ms": ours, "peer": "" if ratio is None else "fla-core", "ratio": ratio,
        "bound_ms": 0.1, "extra": extra, "device": "a GPU",
    }  # fmt: skip


ROWS = [
    row("kda_fwd_bf16_B1_T8192_H96_d128", 9.0, 0.5),
    row("kda_fwd_bf16_B1_T8192_H96_d128", 0.9, 2.5, bytes=1e9, flops=1e9, **CEILINGS),
    row("kda_fwdbwd_bf16_B1_T8192_H96_d128", 3.0, 4.0, bytes=1e6, flops=1e12, **CEILINGS),
    row("kda_fwd_bf16_B8_T2048_H32_d128", 0.6, 2.0),
    row("kda_decode_B1_H96", 0.007, 1.1),
    row("moe_router", 0.04, 7.0),
    row("moe_experts_fwd_k3", 3.0, 1.5),
    row("kda_verify_B1_H96_m4", 0.03, None),
    row("kda_decode_B1_H96", 0.006, None),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    return path


def test_the_newest_row_of_a_name_counts_and_says_what_bounds_it(file: Path) -> None:
    newest = kernels._newest(kernels._read(file))
    assert len(newest) == len(ROWS) - 2
    chart = kernels.roofline(newest)
    assert chart is not None and "4.00 TB/s" in chart.caption and "700 TFLOP/s" in chart.caption
    points = {series.name: list(zip(series.x, series.y)) for series in chart.series if series.style == "dots"}
    assert points["bound by copy"] == [(0.1, 0.9)] and points["bound by matrix product"] == [(0.1, 3.0)]
    assert len(points["bound by copy or matrix product"]) == 5
    assert kernels.roofline([one | {"bound_ms": None} for one in newest]) is None


def test_rows_of_the_same_sizes_share_a_picture(file: Path) -> None:
    charts = kernels.ratios(kernels._newest([one for one in kernels._read(file) if one["ratio"] is not None]))
    assert list(charts) == ["kda-BTH", "kda-BH", "moe"]
    sequence = charts["kda-BTH"]
    assert sequence.categories == ["B1<br>T8192<br>H96", "B8<br>T2048<br>H32"]
    (forward, first), (both, second) = sequence.groups
    assert (forward, both) == ("fwd", "fwdbwd") and first == [2.5, 2.0] and second[0] == 4.0 and second[1] != second[1]
    assert charts["moe"].categories == ["router", "experts<br>fwd<br>k3"]


def test_many_shapes_take_several_pictures() -> None:
    charts = kernels.ratios([row(f"mla_decode_B{n}", 1.0, 2.0) for n in range(1, 31)])
    assert [len(chart.categories) for chart in charts.values()] == [12, 12, 6]


def test_pictures_are_written(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra report")
    drawn = kernels.draw(file, tmp_path / "pictures", "kernels-")
    assert [path.name for path in drawn] == [
        "kernels-roofline.png", "kernels-ratio-kda-BTH.png", "kernels-ratio-kda-BH.png", "kernels-ratio-moe.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"name": "x"}\n'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match="does not hold benchmark rows"):
        kernels._read(path)
    with pytest.raises(RequestError, match="does not hold"):
        kernels._read(tmp_path / "missing.jsonl")
