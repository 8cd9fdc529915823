"""CUDA C++ to machine code with NVRTC, NVIDIA's compiler as a library: no nvcc, no headers, no GPU needed.

The library comes with every CUDA build of torch (package nvidia-cuda-nvrtc); a CUDA toolkit has it too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

FOLDERS = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib")


class CompileError(Exception):
    """A source does not compile; the message is the compiler's."""


def missing() -> str | None:
    """Why there is no NVRTC; None if there is."""
    if _library() is None:
        return (
            "NVRTC (libnvrtc) is not installed; it comes with CUDA builds of torch, or: pip install nvidia-cuda-nvrtc"
        )
    return None


def version() -> tuple[int, int]:
    """The compiler's version, as (13, 0)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(_found().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compiled(source: Path, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
    """Compile a file.

    Args:
        source: the .cu file.
        headers: texts of the files that it may include, by name.
        options: the compiler's; `--gpu-architecture=sm_90a` or the like among them.

    Returns:
        The device's machine code (a cubin) and the compiler's messages.

    Raises:
        CompileError: the source has an error.
    """
    library = _found()
    program = ctypes.c_void_p()
    names = [name.encode() for name in headers]
    texts = [text.encode() for text in headers.values()]
    _checked(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(names),
            (ctypes.c_char_p * len(names))(*texts),
            (ctypes.c_char_p * len(names))(*names),
        )
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), given)
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).rstrip(b"\0").decode().strip()
        if status:
            raise CompileError(f"{source.name}: {log or _message(status)}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _checked(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _checked(read(program, buffer))
    return buffer.raw


@cache
def _library() -> ctypes.CDLL | None:
    for path in _candidates():
        try:
            # NVRTC opens its builtins by their bare name, which finds them only if they are loaded already.
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def _found() -> ctypes.CDLL:
    library = _library()
    assert library is not None, "asked for a compilation where `missing` gives a reason"
    return library


def _candidates() -> Iterator[str]:
    """Python packages first, torch's own CUDA release before others; then a toolkit, then the loader's path."""
    package = importlib.util.find_spec("nvidia")
    packaged = (
        [p for f in package.submodule_search_locations or () for p in Path(f).glob("*/lib/libnvrtc.so.*")]
        if package
        else []
    )
    major = (torch.version.cuda or "").partition(".")[0]
    yield from sorted(map(str, packaged), key=lambda path: (not path.endswith(f".so.{major}"), path))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for folder in (*((f"{home}/lib64",) if home else ()), *FOLDERS):
        for path in sorted(Path(folder).glob("libnvrtc.so.*"), reverse=True):
            yield str(path)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _message(status: int) -> str:
    return _found().nvrtcGetErrorString(status).decode()


def _checked(status: int) -> None:
    assert status == 0, f"NVRTC: {_message(status)}"
