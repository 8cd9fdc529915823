"""Compile and load the optional C kernels of this folder.

Each kernel is one plain C99 file beside this module. It is compiled at first use with the system's compiler into a
per-user cache, loaded with ctypes and called with raw data pointers, so neither torch's headers nor a build step at
installation are needed. Where that cannot work (no compiler, no writable directory, PERILUNE_NATIVE=0) `load` returns
None, `unavailable_reason` says why, and the caller's `select()` takes the torch path with that reason.

The cache (`ops/build_cache.py`) keeps it under a key of the source, every header, the compiler, its flags and the
processor.

OpenMP: kernels must run on torch's own thread pool (two pools fight for the cores). Torch's bundled runtime is put in
the global symbol scope first and the kernel is linked without a second one. Kernels take the thread count as an
argument; pass `torch.get_num_threads()`.

Environment: PERILUNE_NATIVE=0 switches all native kernels off, CC names another compiler, PERILUNE_CACHE another
cache directory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from perilune.ops import build_cache

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
COMPILE_TIMEOUT_SECONDS = 180

# Vectorised reductions and comparisons without -ffast-math: none of these changes the meaning of NaN or infinity, and
# none lets the compiler reorder a sum (kernels say `omp simd reduction` where they want that).
_OPTIMISE = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")

_lock = threading.RLock()
_loaded: dict[tuple[str, Path], ctypes.CDLL] = {}
_opened: list[ctypes.CDLL] = []  # all of this process: functions of each may be held somewhere
_failed: dict[tuple[str, Path], str] = {}


class BuildError(Exception):
    """A kernel could not be built or loaded; the message is the reason that `unavailable_reason` reports."""


def load(name: str, folder: Path = SOURCE_FOLDER) -> ctypes.CDLL | None:
    """Return the compiled kernel library `folder/name.c`, building it if needed; None if it cannot be had.

    The answer is remembered for the life of the process.
    """
    return None if _outcome(name, folder) is not None else _loaded[name, folder]


def libraries() -> list[ctypes.CDLL]:
    """The kernel libraries that this process has loaded."""
    return list(_opened)


def unavailable_reason(name: str, folder: Path = SOURCE_FOLDER) -> str | None:
    """Say why `load(name)` returns None, in one line; None when the library is available."""
    return _outcome(name, folder)


@lru_cache
def switched_off() -> bool:
    """Whether PERILUNE_NATIVE says so, read once: a decode step asks dozens of times a token."""
    return os.environ.get("PERILUNE_NATIVE", "").strip().lower() in ("0", "off", "false", "no")


def _outcome(name: str, folder: Path) -> str | None:
    if switched_off():
        return "native kernels are switched off (PERILUNE_NATIVE=0)"
    key = (name, folder)
    if key in _loaded:
        return None
    with _lock:
        if key not in _loaded and key not in _failed:
            try:
                _loaded[key] = _load_or_build(name, folder)
                _opened.append(_loaded[key])
            except BuildError as error:
                _failed[key] = str(error)
                logger.info("native kernel %s is unavailable: %s", name, error)
        return _failed.get(key)


def _load_or_build(name: str, folder: Path) -> ctypes.CDLL:
    source = folder / f"{name}.c"
    if not source.is_file():
        raise BuildError(f"no source file {source}")
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"native kernels are built on Linux and macOS only, not on {sys.platform}")
    _share_torch_openmp()
    compiler = _compiler()
    key = _cache_key(source, compiler)
    for path in build_cache.matching("native", name, key, ".so"):
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # a directory mounted noexec, or a library of this process that is gone
            continue
    if compiler is None:
        raise BuildError("no C compiler found (looked for CC, gcc, cc, clang)")
    return _build(source, compiler, key)


def _build(source: Path, compiler: tuple[str, ...], key: str) -> ctypes.CDLL:
    problem = "no writable directory for compiled kernels (tried PERILUNE_CACHE, the user's cache and a temporary one)"
    for compile_flags, link_flags in _flag_sets():
        try:
            built = _compile(source, compiler, compile_flags, link_flags)
        except BuildError as error:
            problem = str(error)
            continue
        for path in build_cache.written("native", source.stem, key, ".so", built):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:  # unresolved OpenMP symbols, or a directory mounted noexec
                problem = f"the compiled {source.name} does not load: {error}"
                path.unlink(missing_ok=True)
    raise BuildError(problem)


def _compile(
    source: Path, compiler: tuple[str, ...], compile_flags: tuple[str, ...], link_flags: tuple[str, ...]
) -> bytes:
    """Compile and link in two steps: `-fopenmp` at the link would pull in a second OpenMP runtime."""
    with tempfile.TemporaryDirectory(prefix="perilune-") as scratch:
        objects, library = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        for command in (
            [*compiler, *_OPTIMISE, *compile_flags, "-c", str(source), "-o", str(objects)],
            [*compiler, "-shared", *link_flags, str(objects), "-o", str(library)],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{compiler[0]} failed: {error}") from error
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise BuildError(f"{compiler[0]} failed on {source.name}: {lines[0]}")
        return library.read_bytes()


def _flag_sets() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(compile flags, link flags) to try in order: OpenMP and this processor's instructions first, plain C last."""
    tuned = ("-march=native",) if platform.machine().lower() in ("x86_64", "amd64", "i686") else ("-mcpu=native",)
    if sys.platform == "darwin":
        yield (*tuned, "-Xclang", "-fopenmp"), ("-undefined", "dynamic_lookup")
    else:
        yield (*tuned, "-fopenmp"), ()  # symbols from torch's runtime, see `_share_torch_openmp`
        yield (*tuned, "-fopenmp"), ("-fopenmp",)  # a torch that uses the system's runtime
    yield (*tuned, "-fopenmp-simd"), ()
    yield (), ()


def _cache_key(source: Path, compiler: tuple[str, ...] | None) -> str:
    built_by = repr((_OPTIMISE, list(_flag_sets()), _version(compiler) if compiler else ""))
    return build_cache.source_key(source, sorted(source.parent.glob("*.h")), built_by, _processor())


@lru_cache
def _compiler() -> tuple[str, ...] | None:
    given = os.environ.get("CC")
    for candidate in (given,) if given else ("gcc", "cc", "clang"):
        words = shlex.split(candidate)
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return None


@lru_cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return " ".join(compiler)


@lru_cache
def _processor() -> str:
    """Name the instruction set: a cache on a shared home directory must not hand AVX-512 code to another machine."""
    text = f"{platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return text
    wanted = ("model name", "flags", "Features", "CPU part")
    return text + "".join(sorted({line for line in lines if line.startswith(wanted)}))


_OMP_PAUSE_HARD = 2  # omp_pause_hard of omp.h


def release_threads() -> bool:
    """Give back the OpenMP threads of the calling thread; they come again when it computes.

    Every thread that computes has a pool of its own. With more pooled threads than cores the runtime lets them sleep
    between two parallel regions instead of spinning, and waking them takes longer than a small region: a decode step of a
    small model then takes 1.6 times as long. So a thread that hands its work over to another one lets its pool go.

    Returns:
        Whether the runtime could be asked (GNU and LLVM have the call since OpenMP 5.0).
    """
    runtime = _share_torch_openmp()
    pause = getattr(runtime, "omp_pause_resource_all", None)
    return pause is not None and pause(_OMP_PAUSE_HARD) == 0


def _share_torch_openmp() -> ctypes.CDLL | None:
    """Put torch's bundled OpenMP runtime in the global scope, where the kernel's own symbols then resolve."""
    import torch

    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs", package / ".dylibs"):
        for pattern in ("libgomp*.so*", "libomp.dylib", "libiomp5*"):
            for path in sorted(folder.glob(pattern)):
                try:
                    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                except OSError:
                    continue
    return None
