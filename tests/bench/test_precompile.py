"""Compilation of a peer's kernels ahead: the candidates are shared out, nothing is launched, a budget ends it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from perilune.bench import harness, precompile

triton = pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")
from triton.runtime import autotuner  # noqa: E402


class Recorder:
    """In the place of a kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def run(self, *args: object, num_warps: int, warmup: bool = False, **kwargs: object) -> None:
        self.calls.append((num_warps, warmup))
        if num_warps == 3:
            raise RuntimeError("out of resource: shared memory")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[autotuner.Autotuner]:
    monkeypatch.setattr(autotuner.Autotuner, "run", autotuner.Autotuner.run)  # put back what compile_only replaces
    made = autotuner.Autotuner.__new__(autotuner.Autotuner)
    made.arg_names, made.early_config_prune, made.perf_model = ["x"], None, None
    made.configs = [triton.Config({}, num_warps=n) for n in range(1, 8)]
    made.base_fn, made.fn = test_candidates_are_shared_out_and_none_is_launched, Recorder()
    yield made


def test_candidates_are_shared_out_and_none_is_launched(tuner, capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for part in range(3):
        tuner.fn = Recorder()
        precompile.compile_only(part, 3, math.inf)
        tuner.run("a tensor", grid=(1,), warmup=False)  # as Triton calls it
        shares.append([warps for warps, _ in tuner.fn.calls])
        assert all(warmup for _, warmup in tuner.fn.calls) and tuner.nargs is None
    assert sorted(sum(shares, [])) == list(range(1, 8)) and all(shares)
    assert not capsys.readouterr().err, "what does not fit the device is no problem"


def test_nothing_is_begun_after_the_end(tuner) -> None:
    left = precompile.compile_only(0, 1, time.monotonic() - 1)
    tuner.run("a tensor", grid=(1,), warmup=False)  # as Triton calls it
    assert not tuner.fn.calls and len(left) == len(tuner.configs)


def test_candidates_are_tried_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner.Autotuner, "do_bench", autotuner.Autotuner.__dict__["do_bench"])  # put back
    tried = []
    monkeypatch.setattr("triton.testing.do_bench", lambda call, **options: tried.append(options) or call())
    precompile._try_briefly()
    made = autotuner.Autotuner.__new__(autotuner.Autotuner)
    assert made.do_bench(lambda: 3.0, quantiles=(0.5,)) == 3.0
    assert tried == [{"warmup": 4, "rep": 16, "quantiles": (0.5,)}]


def test_processes_report_problems_once_and_end_with_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(precompile, "PROCESSES", 2)
    monkeypatch.setattr(precompile, "_try_briefly", lambda: None)
    problems = precompile.precompile("nonsense:1", seconds=60)
    assert len(problems) == 1 and "nonsense:1" in problems[0] and "KeyError" in problems[0]
    started = time.monotonic()
    assert precompile.precompile("nonsense:1", seconds=1) == [] and time.monotonic() - started < 1
    monkeypatch.setattr(precompile, "START_SECONDS", 0)
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nexec sleep 600\n")
    endless.chmod(0o700)
    monkeypatch.setattr(precompile.sys, "executable", str(endless))
    assert precompile.precompile("nonsense:1", seconds=0.05) == [] and time.monotonic() - started < 60


def test_a_task_that_was_finished_is_not_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "_try_briefly", lambda: None)
    begun: list[list[str]] = []

    class Process:
        returncode: int | None = 0

        def __init__(self, command: list[str], **options: object) -> None:
            begun.append(command[5:])

        def wait(self, timeout: float | None = None) -> None:
            pass

        def poll(self) -> int | None:
            return self.returncode

        def kill(self) -> None:
            pass

    monkeypatch.setattr(precompile.subprocess, "Popen", Process)
    monkeypatch.setattr(precompile, "PROCESSES", 1)
    Process.returncode = 1
    precompile.precompile("kda:8")
    Process.returncode = 0
    precompile.precompile("kda:8", "kda:9")
    precompile.precompile("kda:8", "kda:10")
    assert begun == [["kda:8"], ["kda:8", "kda:9"], ["kda:10"]]


def test_a_suite_compiles_each_task_once_and_not_for_rows_that_are_known(monkeypatch, tmp_path) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(harness, "precompile", lambda *tasks, seconds: asked.append(tasks) or ["precompile: a problem"])
    cases = [
        harness.Case(name=f"row {n}", shape="", make=lambda: (lambda: None, None), precompile=tasks)
        for n, tasks in enumerate([("a", "b"), ("b",), ("b", "c"), ()])
    ]
    rows = harness.run_suite(cases, results=tmp_path / "rows.jsonl", samples=1)
    assert len(rows) == 4 and asked == [("a", "b"), ("c",)]
    harness.run_suite(cases, results=tmp_path / "rows.jsonl", samples=1)
    assert asked == [("a", "b"), ("c",)]
    assert harness.run_suite(cases[:2], budget_seconds=0.0) == [] and len(asked) == 2
