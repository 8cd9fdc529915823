"""The toolchain without a GPU: NVRTC compiles every kernel of the package; the cache notices change and damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import perilune
from perilune.ops.cuda import Kernel, kernel, nvrtc, unavailable_reason
from perilune.ops.kda.cuda import backward, decode, prepare

PACKAGE = Path(perilune.__file__).parent
SOURCE = '#include "device.h"\nKERNEL(64, 1) f(float* a, int n) { a[threadIdx.x] = n * FACTOR; }\n'
TYPES = (False, True)
KERNELS = [
    *(prepare.kernel(dim, wide) for dim in prepare.KEY_DIMS for wide in TYPES),
    backward.kernel(128, 128, True, True, True, True, False, False),
    decode.kernel(128, 128, 4, True, True, True, torch.int32),
]

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "probe.cu").write_text(SOURCE)
    return Kernel(tmp_path / "probe.cu", "f", "Pi", threads=64, defines={"FACTOR": 3})


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "cuda").iterdir())


def test_no_kernel_is_left_out() -> None:
    assert {k.source for k in KERNELS} == set(PACKAGE.rglob("*.cu"))


@needs_nvrtc
@pytest.mark.parametrize("built", KERNELS, ids=lambda k: "-".join([k.entry, *map(str, k.defines.values())]))
def test_every_kernel_compiles(built: Kernel) -> None:
    """For the GPU that it is written for. Registers and spilled bytes are in the messages when it compiles anew."""
    cubin, messages = built.compiled()
    assert cubin[:4] == b"\x7fELF" and built.entry.encode() in cubin
    assert "warning" not in messages.replace("ptxas warning", "warning"), messages


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
