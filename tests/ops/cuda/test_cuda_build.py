"""The toolchain without a GPU: NVRTC compiles every kernel of the package; the cache notices change and damage."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import perilune
from perilune.ops.cuda import Kernel, kernel, nvrtc, unavailable_reason
from perilune.ops.kda.cuda import prepare

PACKAGE = Path(perilune.__file__).parent
SOURCE = '#include "device.h"\nKERNEL(64, 1) f(float* a, int n) { a[threadIdx.x] = n * FACTOR; }\n'
SOURCES = sorted(PACKAGE.rglob("*.cu"))
SIZES = {
    "key": 128,
    "value": 128,
    "key_dim": 128,
    "value_dim": 128,
    "width": 128,
    "bins": 1000,
    "extra": 1,
    "hidden": 96,
    "latent": 64,
    "second": 64,
    "shared": 64,
    "units": 2,
    "rows": 2,
}  # others: 4
FLAGS = (False, True)


def kernels(source: Path) -> list[Kernel]:
    """The kernels that modules beside a source make of it, all flags off, and all on.

    Such a function is `kernel`, of a module with the source's name or taking one, or one whose name ends with that.
    """
    made = []
    for beside in sorted(source.parent.glob("[!_]*.py")):
        module = importlib.import_module(".".join(beside.with_suffix("").relative_to(PACKAGE.parent).parts))
        for name, make in vars(module).items():
            if name.strip("_").endswith("kernel") and inspect.getmodule(inspect.unwrap(make)) is module:
                told = {n: str(p.annotation) for n, p in inspect.signature(make).parameters.items()}
                if any("Mapping" in t or "dict" in t for t in told.values()):
                    continue  # what those of several modules are made by
                if "str" in told.values() or beside.stem == source.stem or name.strip("_") != "kernel":
                    made += [
                        make(**{n: source.stem if t == "str" else value(n, t, flag) for n, t in told.items()})
                        for flag in FLAGS
                    ]
    found = [kernel for kernel in made if kernel.source == source]
    assert found, "no function beside it makes a kernel of it"
    return found


def value(name: str, annotation: str, flag: bool) -> bool | int | None:
    """An argument of a function that makes a kernel."""
    if annotation == "int":
        return SIZES.get(name, 4)
    return flag if annotation == "bool" else None


needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "probe.cu").write_text(SOURCE)
    return Kernel(tmp_path / "probe.cu", "f", "Pi", threads=64, defines={"FACTOR": 3})


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "cuda").iterdir())


@needs_nvrtc
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_every_kernel_compiles(source: Path) -> None:
    """For the GPU that it is written for; one that begins early waits for the kernels before it."""
    for built in kernels(source):
        cubin, _ = built.compiled()
        assert not built.early or "wait_for_earlier();" in source.read_text()
        assert cubin[:4] == b"\x7fELF" and built.entry.encode() in cubin


@needs_nvrtc
@pytest.mark.parametrize(("full", "bounded"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("key_dim", prepare.KEY_DIMS)
def test_prepare_spills_next_to_nothing(
    key_dim: int, full: bool, bounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks a multiprocessor leave 80 registers a thread, two 128."""
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    _, messages = prepare.kernel(key_dim, False, full, bounded).compiled()
    found = re.search(r"(\d+) bytes spill stores", messages)
    assert found is not None and int(found[1]) <= 16, messages


@needs_nvrtc
def test_compiled_once(probe: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin, messages = probe.compiled()
    assert "registers" in messages and len(cached(tmp_path)) == 1
    monkeypatch.setattr(nvrtc, "compiled", lambda *a: pytest.fail("compiled although the cache has it"))
    assert probe.compiled() == (cubin, "")


@needs_nvrtc
def test_damaged_file_is_made_again(probe: Kernel, tmp_path: Path) -> None:
    cubin, _ = probe.compiled()
    (path,) = cached(tmp_path)
    path.write_bytes(cubin[:-1])
    assert probe.compiled()[1] and path.read_bytes() == cubin


@needs_nvrtc
def test_source_headers_macros_and_target_are_in_the_key(probe: Kernel, tmp_path: Path) -> None:
    probe.compiled()
    probe.source.write_text(SOURCE + "// changed\n")
    probe.compiled()
    (tmp_path / "beside.h").write_text("// new\n")
    probe.compiled()
    probe.defines["FACTOR"] = 4
    probe.compiled()
    probe.compiled((8, 0))
    assert len(cached(tmp_path)) == 5


@needs_nvrtc
def test_errors_name_the_line(probe: Kernel) -> None:
    probe.source.write_text(SOURCE.replace("FACTOR", "missing"))
    with pytest.raises(nvrtc.CompileError, match=r"probe\.cu\(2\).*missing"):
        probe.compiled()


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = unavailable_reason(torch.device("cpu"))
    assert reason is not None and "not on cpu" in reason
    monkeypatch.setattr(kernel, "switched_off", lambda: True)
    reason = unavailable_reason(torch.device("cuda"))
    assert reason is not None and "PERILUNE_CUDA=0" in reason
