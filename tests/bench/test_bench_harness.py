"""The bench harness: what a row holds, alternation, budget, resumption. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from perilune.bench import harness, kernels
from perilune.bench.harness import Case, Row, append, read, run_suite
from perilune.errors import ConfigError

KEYS = {"name", "shape", "ours_ms", "peer", "peer_ms", "ratio", "bound_ms", "device", "versions", "commit"}


class Clock:
    """A clock that moves only when a timed function says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def spend(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(harness.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(harness, "copy_ceiling", lambda device: 1e9)
    monkeypatch.setattr(harness, "matmul_ceiling", lambda device, dtype: 1e10)
    return clock


def _case(clock: Clock, name: str = "a", ours: float = 0.1, peer: float | None = 0.3, **work: float) -> Case:
    def make():
        run = lambda: clock.spend(f"{name} ours", ours)  # noqa: E731
        return run, None if peer is None else lambda: clock.spend(f"{name} peer", peer)

    return Case(name=name, shape="N=1", make=make, peer="the peer", **work)


def test_a_row_holds_medians_ratio_and_bound(clock: Clock) -> None:
    row = _case(clock, flops=5e8, bytes=1e7).measure("cpu", samples=5)
    assert row.ours_ms == pytest.approx(100) and row.peer_ms == pytest.approx(300)
    assert row.ratio == pytest.approx(3.0), "our speed over the peer's"
    assert row.bound_ms == pytest.approx(50), "the larger of 10 ms of bytes and 50 ms of operations"
    assert row.samples == 5 and row.ours_spread_ms == pytest.approx((100, 100))
    assert KEYS <= row.to_json().keys()
    assert "threads" in row.device and row.versions["torch"] == torch.__version__
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_ours_and_the_peer_alternate_after_a_warm_up(clock: Clock) -> None:
    _case(clock).measure("cpu", samples=3)
    assert clock.calls == ["a ours", "a ours", "a peer", "a peer"] + ["a ours", "a peer"] * 3


def test_no_peer_no_ratio(clock: Clock) -> None:
    row = _case(clock, peer=None).measure("cpu", samples=3)
    assert row.peer_ms is None and row.ratio is None and row.bound_ms is None


def test_short_calls_are_repeated_and_long_rows_stop_early(clock: Clock) -> None:
    row = _case(clock, ours=1e-5, peer=1e-5).measure("cpu", samples=3)
    assert row.ours_ms == pytest.approx(0.01) and clock.calls.count("a ours") >= 3 * 200
    assert _case(clock, ours=10.0).measure("cpu", samples=9).samples == harness.MIN_SAMPLES


def test_a_budget_stops_between_rows_and_a_results_file_continues(clock: Clock, tmp_path: Path) -> None:
    results = tmp_path / "results" / "kernels.jsonl"
    seen: list[str] = []
    names = ["a", "b", "c"]
    cases = [_case(clock, name) for name in names]
    first = run_suite(cases, budget_seconds=0.5, results=results, samples=3, on_row=lambda row: seen.append(row.name))
    assert [row.name for row in first] == ["a"], "the row that was running is finished, no other is begun"
    calls = len(clock.calls)
    second = run_suite(cases, budget_seconds=3.5, results=results, samples=3)
    assert [row.name for row in second] == ["a", "b", "c"][: len(second)] and len(second) >= 2
    assert "a ours" not in clock.calls[calls:], "taken from the file"
    third = run_suite(cases, results=results, samples=3, on_row=lambda row: seen.append(row.name))
    assert [row.name for row in third] == names and seen == ["a", *names]
    assert [row.name for row in read(results)] == names
    assert [row.name for row in run_suite(cases, budget_seconds=0.0, results=results)] == names, "nothing to measure"


def test_rows_of_other_code_machine_or_shape_are_measured_again(clock: Clock, tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    (row,) = run_suite([_case(clock)], results=results, samples=3)
    for change in ({"commit": "0000000"}, {"device": "another"}, {"versions": {}}, {"shape": "N=2"}):
        results.write_text("")
        append(results, Row(**(row.to_json() | change)))
        run_suite([_case(clock)], results=results, samples=3)
        assert len(read(results)) == 2, change


def test_a_line_cut_off_by_a_kill_is_left_out_and_rubbish_is_refused(clock: Clock, tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    run_suite([_case(clock, "a"), _case(clock, "b")], results=results, samples=3)
    whole = results.read_text()
    results.write_text(whole[: len(whole) - 40])
    assert [row.name for row in read(results)] == ["a"]
    run_suite([_case(clock, "a"), _case(clock, "b")], results=results, samples=3)
    assert [row.name for row in read(results)] == ["a", "b"], "the rest of the line is gone, b is measured again"
    results.write_text("{\n" + whole)
    with pytest.raises(ConfigError, match="line 1"):
        read(results)
    results.write_text('{"name": "a"}\n' + whole)
    with pytest.raises(ConfigError, match="not a benchmark row"):
        read(results)


def test_ceilings_are_positive_and_measured_once() -> None:
    assert harness.copy_ceiling("cpu") == harness.copy_ceiling("cpu") > 0
    assert harness.matmul_ceiling("cpu", torch.float32) > 0


def test_kernel_rows_are_unique_and_cover_the_required_ones() -> None:
    cases = [case for op in kernels.OPS for case in kernels.OPS[op]("cpu")]
    names = [(case.name, case.shape) for case in cases]
    assert len(set(names)) == len(names)
    assert {"kda_fwd_B4_T512_H4_d64", "kda_fwdbwd_B4_T512_H4_d64"} <= {case.name for case in cases}
    for prefix in ("kda_fwd_", "kda_fwdbwd_", "kda_decode_"):
        assert sum(case.name.startswith(prefix) for case in cases) > 1, "more than one shape"


@pytest.mark.parametrize("name", ["kda_fwdbwd_B4_T512_H4_d64_vs_chunked", "kda_decode_B8_H4_d64"])
def test_kernel_rows_compute_the_same_on_both_sides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", ((4, 32, 4, 64),))
    wanted = name.replace("T512", "T32")
    case = next(case for op in ("kda", "kda_decode") for case in kernels.OPS[op]("cpu") if case.name == wanted)
    (ours, _), (_, peer) = case.make(), case.make()  # fresh inputs for each: a decode step moves its state on
    a, b = ours(), peer()
    if isinstance(a, tuple):
        a, b = (torch.cat([x.flatten() for x in gradients]) for gradients in (a, b))
    assert (a - b).norm() < 1e-4 * b.norm()


def test_run_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match="kda"):
        kernels.run("cpu", 0.0, ("kdaa",))
    with pytest.raises(ConfigError, match="allowed: cpu, cuda"):
        kernels.run("tpu", 0.0)
    assert kernels.run("cpu", 0.0, ("kda",)) == []
