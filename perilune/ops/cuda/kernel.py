"""A CUDA kernel of this package: compiled at first use, launched on tensors of a GPU or, emulated, of the CPU.

    KERNEL = Kernel(Path(__file__).parent / "scale.cu", "scale", "PPfq", threads=256, defines={"K": 128})
    reason = KERNEL.unavailable_reason(x.device)
    KERNEL.launch((blocks,), x, y, 2.0, x.numel())

Where the same launch comes again and again, `Kernel.fixed` lays it out once; what is left to give are the pointers.

The source includes "device.h" (see there), other headers of this folder and those of its own. NVRTC compiles it for the device at
hand and cached per user; the key covers source, headers, options and the compiler's version. Nothing falls back silently:
a caller asks `unavailable_reason` and takes another path with that reason.

Environment: PERILUNE_CUDA=0 switches these kernels off; PERILUNE_CACHE names another cache directory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from perilune.ops import build_cache, first_use
from perilune.ops.cuda import driver, emulator, nvrtc

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
TARGET = (9, 0)  # the compute capability that the kernels are written for and measured on
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
KEPT = 128  # laid out launches of a kernel; the oldest is dropped

_emulated: ContextVar[bool] = ContextVar("perilune_cuda_emulated", default=False)
_backwards: ContextVar[bool] = ContextVar("perilune_cuda_backwards", default=False)


@contextmanager
def emulated(backwards: bool = False) -> Iterator[None]:
    """Within the block kernels take CPU tensors, in the emulator; `backwards`: the last warp and lane run first."""
    tokens = _emulated.set(True), _backwards.set(backwards)
    try:
        yield
    finally:
        _emulated.reset(tokens[0])
        _backwards.reset(tokens[1])


@cache
def switched_off() -> bool:
    """Whether PERILUNE_CUDA says so, read once."""
    return os.environ.get("PERILUNE_CUDA", "").strip().lower() in ("0", "off", "false", "no")


def unavailable_reason(device: torch.device) -> str | None:
    """Why no CUDA kernel of this package can run on `device`, in one line; None if they can."""
    if switched_off():
        return "CUDA kernels are switched off (PERILUNE_CUDA=0)"
    if device.type == "cuda":
        return _device_obstacle(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu" and _emulated.get():
        return emulator.missing()
    return f"the CUDA kernels run on CUDA devices, not on {device.type}"


@cache
def _device_obstacle(index: int) -> str | None:
    if torch.version.cuda is None:
        return "the CUDA kernels are written for CUDA devices, not for this build of torch"
    capability = torch.cuda.get_device_capability(index)
    if capability != TARGET:
        return "the CUDA kernels are written for compute capability {}.{}, not {}.{}".format(*TARGET, *capability)
    return driver.missing() or nvrtc.missing()


class Kernel:
    """One kernel with fixed macros.

    Args:
        source: the .cu file.
        entry: the kernel's name in it.
        parameters: its parameters, a letter each, as in `struct`: P pointer (a tensor or None), i int, q 64-bit integer,
            f float.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        defines: macros, integers.
        early: launched so that it may begin before the kernel ahead of it has ended; it calls `wait_for_earlier`.
    """

    def __init__(
        self,
        source: Path,
        entry: str,
        parameters: str,
        *,
        threads: int,
        shared_bytes: int = 0,
        defines: Mapping[str, int] | None = None,
        early: bool = False,
    ) -> None:
        self.source, self.entry, self.threads, self.shared_bytes = source, entry, threads, shared_bytes
        self.defines, self.early = dict(defines or {}), early
        self._pointers = tuple(letter == "P" for letter in parameters)
        self._layout = struct.Struct("@" + parameters)
        self._parameters = driver.Parameters(self._layout.size)
        self._lock = threading.RLock()
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._failed: dict[int, str] = {}
        self._library: ctypes.CDLL | None = None
        self._fixed: dict[tuple[Any, ...], Launch] = {}

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why this kernel cannot run on `device`; None if it can, and then it is compiled and loaded."""
        reason = unavailable_reason(device)
        if reason is not None or device.type != "cuda":
            return reason
        index = torch.cuda.current_device() if device.index is None else device.index
        if index in self._functions:
            return None
        with self._lock:
            if index not in self._functions and index not in self._failed:
                began = time.perf_counter()
                try:
                    cubin, _ = self.compiled(torch.cuda.get_device_capability(index))
                    self._functions[index] = driver.load(cubin, self.entry, index, self.shared_bytes)
                except (nvrtc.CompileError, driver.CudaError) as error:
                    self._failed[index] = str(error).splitlines()[0]
                    logger.warning("CUDA kernel %s is unavailable: %s", self.entry, error)
                first_use.tell(f"loaded {self.entry}", time.perf_counter() - began)
            return self._failed.get(index)

    def launch(self, grid: Sequence[int], *arguments: Tensor | float | None) -> None:
        """Queue the kernel on the current stream of the tensors' device; the first argument is a tensor.

        The tensors have to stay alive until the call returns (torch's allocator keeps memory of freed tensors for later
        work of the same stream).

        Raises:
            CudaError: the launch was refused.
            EmulatorError: emulated, the kernel did what no kernel may do.
        """
        first = arguments[0]
        assert isinstance(first, Tensor)
        if 0 in grid:
            return
        given = zip(self._pointers, cast("tuple[Any, ...]", arguments), strict=True)
        values = [x if not pointer else 0 if x is None else x.data_ptr() for pointer, x in given]
        sizes = (*grid, 1, 1)[:3]
        if first.is_cuda:
            index = first.get_device()
            function = self._function(first.device)
            with self._lock:
                self._layout.pack_into(self._parameters.buffer, 0, *values)
                driver.launch(function, sizes, self.threads, self.shared_bytes, self._parameters, index, self.early)
            return
        self._emulate(sizes, self._layout.pack(*values))

    def fixed(self, device: torch.device, grid: Sequence[int], *scalars: float) -> Launch:
        """The launch on `device` with this grid and these scalars, of a kernel whose parameters begin with its pointers."""
        key = (device, tuple(grid), scalars)
        found = self._fixed.get(key)
        if found is None:
            if len(self._fixed) >= KEPT:
                self._fixed.pop(next(iter(self._fixed)), None)
            found = self._fixed[key] = Launch(self, device, (*grid, 1, 1)[:3], scalars)
        return found

    def _function(self, device: torch.device) -> ctypes.c_void_p:
        index = torch.cuda.current_device() if device.index is None else device.index
        function = self._functions.get(index)
        if function is None:
            reason = self.unavailable_reason(device)
            assert reason is None, reason
            function = self._functions[index]
        return function

    def _emulate(self, grid: Sequence[int], parameters: bytes) -> None:
        assert _emulated.get(), "CPU tensors outside `emulated()`"
        with self._lock:  # the emulator runs one grid at a time
            if self._library is None:
                self._library = emulator.load(self.source, self.entry, self._headers(), self.defines)
            emulator.launch(self._library, grid, self.threads, self.shared_bytes, parameters, _backwards.get())

    def compiled(self, capability: tuple[int, int] = TARGET) -> tuple[bytes, str]:
        """Machine code for a compute capability and the compiler's messages (none when the code was cached).

        Raises:
            CompileError: the source has an error.
        """
        options = self.options(capability)
        name = build_cache.source_key(self.source, self._headers(), *options, repr(nvrtc.version()))
        path = next(build_cache.matching("cuda", self.source.stem, name, ".cubin"), None)
        if path is not None:
            return path.read_bytes(), ""
        headers = {header.name: header.read_text() for header in self._headers()}
        cubin, log = nvrtc.compiled(self.source, headers, options)
        next(build_cache.written("cuda", self.source.stem, name, ".cubin", cubin), None)
        return cubin, log

    def options(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """What the compiler is told."""
        target = "--gpu-architecture=sm_{}{}".format(*capability) + ("a" if capability >= (9, 0) else "")
        return (target, *OPTIONS, *(f"-D{name}={value}" for name, value in self.defines.items()))

    def _headers(self) -> list[Path]:
        """What the source may include: the headers here, and those beside it."""
        shared = (path for path in FOLDER.glob("*.h") if path.name != "emulator.h")
        return [*sorted(shared), *sorted(self.source.parent.glob("*.h"))]


class Launch:
    """A kernel with its device, grid and scalars; see `Kernel.fixed`. Called with its pointers, from any thread."""

    def __init__(self, kernel: Kernel, device: torch.device, grid: tuple[int, ...], scalars: tuple[float, ...]) -> None:
        self.kernel, self.grid = kernel, grid
        pointers = sum(kernel._pointers)
        assert all(kernel._pointers[:pointers]), "the pointers come first"
        self._pointers = struct.Struct(f"@{pointers}P")
        self._packed = bytearray(kernel._layout.pack(*[0] * pointers, *scalars))
        self._lock = threading.Lock()
        self._order: driver.Order | None = None
        if device.type == "cuda" and 0 not in grid:
            index = torch.cuda.current_device() if device.index is None else device.index
            order = (kernel._function(device), grid, kernel.threads, kernel.shared_bytes, len(self._packed), index)
            self._order = driver.Order(*order, kernel.early)
            self._order.buffer[:] = self._packed

    def __call__(self, *pointers: Tensor | int | None) -> None:
        """Queue it, as `Kernel.launch`; an int is an address in the memory of a tensor that lives until the call returns.

        Raises:
            CudaError: the launch was refused.
            EmulatorError: emulated, the kernel did what no kernel may do.
        """
        addresses = [x if type(x) is int else 0 if x is None else cast(Tensor, x).data_ptr() for x in pointers]
        if self._order is not None:
            with self._lock:
                self._pointers.pack_into(self._order.buffer, 0, *addresses)
                self._order.queue()
        elif 0 not in self.grid:
            packed = bytearray(self._packed)
            self._pointers.pack_into(packed, 0, *addresses)
            self.kernel._emulate(self.grid, bytes(packed))
