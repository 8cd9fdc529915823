"""Kernels on the CPU: the same .cu source, compiled by the system's C++ compiler against emulator.h.

For tests and for reading a kernel with a debugger, not for speed: a block of 256 threads takes milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from perilune.errors import PeriluneError
from perilune.ops import build_cache

FOLDER = Path(__file__).parent
COMPILE_TIMEOUT_SECONDS = 180
# -fno-strict-aliasing: kernels see shared memory as several types, which NVIDIA's compiler allows.
OPTIONS = (
    "-O1",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",  # its check of longjmp knows nothing of fibers
    "-w",
    "-DPERILUNE_EMULATED",
)

_WRAPPER = """
#include "{source}"
extern "C" int emulate(const u8* parameters, size_t size, const u32* grid, int threads, size_t shared, int order, char* message) {{
    return emulator::run({entry}, parameters, size, grid, threads, shared, order, message);
}}
"""


class EmulatorError(PeriluneError):
    """A kernel does not compile for the CPU, or did what no kernel may do."""


@cache
def _compiler() -> tuple[str, ...] | None:
    given = os.environ.get("CXX")
    for candidate in (given,) if given else ("g++", "c++", "clang++"):
        words = shlex.split(candidate)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return None


def missing() -> str | None:
    """Why kernels cannot be emulated here; None if they can."""
    if _compiler() is None:
        return "no C++ compiler found (looked for CXX, g++, c++, clang++)"
    return None


def load(source: Path, entry: str, headers: Sequence[Path], defines: Mapping[str, int]) -> ctypes.CDLL:
    """The kernel as a library with the one function `emulate`.

    Raises:
        EmulatorError: it does not compile, or no directory takes the result.
    """
    compiler = _compiler()
    assert compiler is not None, "asked for an emulation where `missing` gives a reason"
    options = (*OPTIONS, f"-I{FOLDER}", f"-I{source.parent}", *(f"-D{n}={v}" for n, v in defines.items()))
    text = _WRAPPER.format(source=source.name, entry=entry)
    key = build_cache.source_key(source, [*headers, FOLDER / "emulator.h"], text, *compiler, *options)
    path = next(build_cache.matching("emulated", source.stem, key, ".so"), None)
    if path is None:
        with tempfile.TemporaryDirectory(prefix="perilune-") as scratch:
            wrapper, built = Path(scratch) / "wrapper.cpp", Path(scratch) / "kernel.so"
            wrapper.write_text(text)
            command = [*compiler, *options, str(wrapper), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS)
            if done.returncode:
                raise EmulatorError(f"{source.name} does not compile for the CPU: {done.stderr.strip()[:2000]}")
            path = next(build_cache.written("emulated", source.stem, key, ".so", built.read_bytes()), None)
        if path is None:
            raise EmulatorError("no writable directory for emulated kernels; set PERILUNE_CACHE")
    return ctypes.CDLL(str(path))


def launch(
    library: ctypes.CDLL, grid: Sequence[int], threads: int, shared_bytes: int, arguments: bytes, backwards: bool
) -> None:
    """Run the grid. `backwards`: the last warp and lane first; results must not depend on it.

    Raises:
        EmulatorError: a barrier that not all threads reach, a write beyond shared memory, and the like.
    """
    message = ctypes.create_string_buffer(256)
    sizes = (ctypes.c_uint32 * 3)(*grid)
    size, shared = ctypes.c_size_t(len(arguments)), ctypes.c_size_t(shared_bytes)
    if library.emulate(arguments, size, sizes, threads, shared, int(backwards), message):
        raise EmulatorError(message.value.decode())
