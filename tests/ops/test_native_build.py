"""The loader of native kernels: it builds once, notices damage, survives races, and says why it cannot build."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.ops import build_cache
from perilune.ops.native import build

SOURCE = """
#include "math.h"
void pl_apply(const float *x, float *y, int64_t n, int which) {
    #pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = which == 0 ? pl_expf(x[i]) : which == 1 ? pl_sigmoidf(x[i]) : which == 2 ? pl_tanhf(x[i]) : pl_softplusf(x[i]);
}
void pl_round_trip(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = pl_from_bf16(pl_to_bf16(x[i]));
}
int64_t pl_threads(int64_t *seen, int threads) {
    int64_t count = 0;
    #pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+:count)
    for (int i = 0; i < threads; i++) { seen[i] = i; count++; }
    return count;
}
"""

needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="no C compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder and an empty cache of their own, with native kernels switched on."""
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "switched_off", lambda: False)
    sources = tmp_path / "src"
    sources.mkdir()
    shutil.copy(build.SOURCE_FOLDER / "math.h", sources)
    (sources / "probe.c").write_text(SOURCE)
    return sources


def _forget() -> None:
    build._loaded.clear()
    build._failed.clear()


def _cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "native").glob("probe-*.so"))


def _apply(library: ctypes.CDLL, x: torch.Tensor, which: int) -> torch.Tensor:
    y = torch.full_like(x, math.nan)
    library.pl_apply(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()), which)
    return y


@needs_compiler
def test_builds_once_and_reuses_the_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.load("probe", folder) is not None
    assert build.unavailable_reason("probe", folder) is None
    first = _cached(tmp_path)
    assert len(first) == 1
    assert [p.name for p in (tmp_path / "cache" / "native").iterdir()] == [first[0].name], "scratch files remain"
    _forget()
    monkeypatch.setattr(build, "_build", lambda *a: pytest.fail("rebuilt although the cache has it"))
    assert build.load("probe", folder) is not None


@needs_compiler
def test_a_changed_source_or_header_gets_its_own_file(folder: Path, tmp_path: Path) -> None:
    build.load("probe", folder)
    (folder / "math.h").write_text((folder / "math.h").read_text() + "\n/* changed */\n")
    _forget()
    build.load("probe", folder)
    assert len(_cached(tmp_path)) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "altered", "empty"])
def test_a_damaged_library_is_rebuilt(folder: Path, tmp_path: Path, damage: str) -> None:
    build.load("probe", folder)
    (path,) = _cached(tmp_path)
    good = path.read_bytes()
    bad = {"truncated": good[: len(good) // 2], "altered": good[:-1] + bytes([good[-1] ^ 1]), "empty": b""}[damage]
    path.unlink()  # the loaded image stays mapped; writing in place would pull it from under this process
    path.write_bytes(bad)
    _forget()
    library = build.load("probe", folder)
    assert library is not None
    assert path.read_bytes() == good
    assert _apply(library, torch.zeros(3), 0).tolist() == [1.0, 1.0, 1.0]


def _race(folder: Path, cache: str, answers) -> None:
    import os

    os.environ["PERILUNE_CACHE"] = cache
    library = build.load("probe", folder)
    answers.put(None if library is None else _apply(library, torch.zeros(2), 0).tolist())


@needs_compiler
def test_many_builders_at_once_all_get_a_whole_library(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    builders = [context.Process(target=_race, args=(folder, str(tmp_path / "cache"), answers)) for _ in range(4)]
    for builder in builders:
        builder.start()
    assert [answers.get(timeout=120) for _ in builders] == [[1.0, 1.0]] * 4
    for builder in builders:
        builder.join()


SWITCHED_OFF = build.switched_off.__wrapped__


def test_switched_off_by_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERILUNE_NATIVE", "0")
    monkeypatch.setattr(build, "switched_off", SWITCHED_OFF)
    assert build.load("probe", folder) is None
    assert "PERILUNE_NATIVE=0" in build.unavailable_reason("probe", folder)
    monkeypatch.delenv("PERILUNE_NATIVE")
    if build._compiler() is not None:
        assert build.load("probe", folder) is not None, "nothing else was in the way"


def test_no_compiler_is_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compiler", lambda: None)
    assert build.load("probe", folder) is None
    assert "no C compiler" in build.unavailable_reason("probe", folder)


@needs_compiler
def test_a_source_that_does_not_compile_is_a_reason(folder: Path) -> None:
    (folder / "probe.c").write_text("int broken(")
    assert build.load("probe", folder) is None
    assert "probe.c" in build.unavailable_reason("probe", folder)
    assert build.load("absent", folder) is None
    assert "absent.c" in build.unavailable_reason("absent", folder)


@needs_compiler
def test_an_unusable_cache_falls_back_to_a_temporary_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PERILUNE_CACHE", str(blocked))  # not a directory: as unusable as a read-only one, even for root
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(build_cache.tempfile, "gettempdir", lambda: str(temporary))
    assert build.load("probe", folder) is not None
    assert list(temporary.glob("perilune-*/native/probe-*.so"))


@needs_compiler
def test_a_directory_that_others_can_write_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "cache" / "native"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert shared not in list(build_cache.directories("native"))


@needs_compiler
def test_one_openmp_runtime_is_mapped(folder: Path) -> None:
    library = build.load("probe", folder)
    seen = torch.full((2,), -1, dtype=torch.int64)
    library.pl_threads.restype = ctypes.c_int64
    assert library.pl_threads(ctypes.c_void_p(seen.data_ptr()), 2) == 2
    assert seen.tolist() == [0, 1]
    maps = Path("/proc/self/maps")
    if maps.exists():
        runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
        assert len(runtimes) <= 1, runtimes


@needs_compiler
def test_elementwise_functions_match_float64(folder: Path) -> None:
    library = build.load("probe", folder)
    small = torch.logspace(-30, 0, 2001)
    x = torch.cat([torch.linspace(-87, 88, 100_001), small, -small, torch.linspace(-1, 1, 20_001)])
    wide = x.double()
    exact = [torch.exp(wide), torch.sigmoid(wide), torch.tanh(wide), torch.nn.functional.softplus(wide, threshold=1e9)]
    for which, truth in enumerate(exact):
        got = _apply(library, x, which).double()
        relative = ((got - truth) / truth).abs().nan_to_num(0.0)  # tanh(0) / 0
        assert relative.max() < 4e-7, (which, relative.max().item(), x[relative.argmax()].item())


@needs_compiler
def test_elementwise_functions_at_the_limits(folder: Path) -> None:
    library = build.load("probe", folder)
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 88.8, -200.0, 1e30, -1e30, 88.7, -103.0])
    exp, sigmoid, tanh, softplus = (_apply(library, x, which) for which in range(4))
    assert exp[:9].tolist()[:2] == [math.inf, 0.0] and exp[3:5].tolist() == [1.0, 1.0]
    assert exp[5] == math.inf and exp[6] == 0 and exp[7] == math.inf and exp[8] == 0
    assert torch.isfinite(exp[9]) and 0 < exp[10] < 1e-44
    assert sigmoid[[0, 1, 3, 7, 8]].tolist() == [1.0, 0.0, 0.5, 1.0, 0.0]
    assert tanh[[0, 1, 3, 7, 8]].tolist() == [1.0, -1.0, 0.0, 1.0, -1.0]
    assert softplus[[0, 1]].tolist() == [math.inf, 0.0] and softplus[7] == x[7]
    assert all(bool(torch.isnan(y[2])) for y in (exp, sigmoid, tanh, softplus))


@needs_compiler
def test_bf16_rounding_is_torchs(folder: Path) -> None:
    library = build.load("probe", folder)
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    x = torch.from_numpy(
        np.concatenate([bits, np.uint32([0x7FFFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000])]).view(np.float32)
    )
    y = torch.zeros_like(x)
    library.pl_round_trip(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
    truth = x.bfloat16().float()
    assert torch.equal(torch.isnan(y), torch.isnan(x))
    assert torch.equal(y.nan_to_num(1.5), truth.nan_to_num(1.5))


def test_threads_come_back_after_they_were_let_go() -> None:
    """The same products before and after, and no fewer threads."""
    x, threads = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    before = x @ x
    for _ in range(2):
        assert build.release_threads() in (True, False)
        assert torch.equal(x @ x, before) and torch.get_num_threads() == threads
