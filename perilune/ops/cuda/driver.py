"""The few calls of the CUDA driver that load a kernel and launch it, in torch's context and on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from perilune.errors import PeriluneError

_MAX_DYNAMIC_SHARED, _CARVEOUT = 8, 9  # CU_FUNC_ATTRIBUTE_*
_BUFFER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_*
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_WRONG_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE


class CudaError(PeriluneError):
    """The driver refused a call."""


def missing() -> str | None:
    """Why there is no CUDA driver; None if there is."""
    return None if _library() is not None else "there is no CUDA driver (libcuda.so.1)"


def load(cubin: bytes, entry: str, device: int, shared_bytes: int) -> ctypes.c_void_p:
    """Load machine code on a device and return its function `entry`, allowed that much dynamic shared memory.

    Raises:
        CudaError: the device does not take the code.
    """
    library = _found()
    _enter(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _checked(library.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    _checked(library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding {entry}")
    if shared_bytes:
        _checked(
            library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
            f"{shared_bytes} bytes of shared memory",
        )
        _checked(library.cuFuncSetAttribute(function, _CARVEOUT, 100), "the carve-out of shared memory")
    return function


class Parameters:
    """Where a kernel's parameters are laid out for the driver, which copies them at a launch; one launch at a time."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self._size = ctypes.c_size_t(size)
        self.extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self.buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute whose value is an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_EARLY = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)


class Order:
    """A launch of which only the parameters in `buffer` and the stream change: all else is laid out for the driver once.

    One call at a time; the driver copies the parameters.
    """

    def __init__(
        self, function: ctypes.c_void_p, grid: Sequence[int], threads: int, shared_bytes: int, size: int, device: int, early: bool
    ) -> None:  # fmt: skip
        self._parameters = Parameters(size)
        self.buffer = self._parameters.buffer
        self._how = _Configuration(
            *grid, threads, 1, 1, shared_bytes, None, ctypes.pointer(_EARLY) if early else None, int(early)
        )
        self._arguments = (ctypes.byref(self._how), function, None, self._parameters.extra)
        self._device, self._call = device, _found().cuLaunchKernelEx

    def queue(self) -> None:
        """As `launch`, on torch's current stream of the device.

        Raises:
            CudaError: the launch was refused.
        """
        self._how.stream = torch._C._cuda_getCurrentRawStream(self._device)
        status = self._call(*self._arguments)
        if status in _WRONG_CONTEXT:  # as in `launch`
            _enter(self._device)
            status = self._call(*self._arguments)
        _checked(status, "cuLaunchKernelEx")


def launch(
    function: ctypes.c_void_p, grid: Sequence[int], threads: int, shared_bytes: int, parameters: Parameters, device: int,
    early: bool = False,
) -> None:  # fmt: skip
    """Queue a kernel on torch's current stream of `device`; `early`: it may begin before the kernel ahead of it has ended.

    Raises:
        CudaError: the launch was refused; what goes wrong later shows at the next synchronisation, as with torch.
    """
    # torch.cuda.current_stream makes an object around this number, which takes as long as the rest of the launch
    stream = torch._C._cuda_getCurrentRawStream(device)

    def call() -> int:
        if not early:
            return _found().cuLaunchKernel(
                function, *grid, threads, 1, 1, shared_bytes, stream, None, parameters.extra
            )  # fmt: skip
        how = _Configuration(*grid, threads, 1, 1, shared_bytes, stream, ctypes.pointer(_EARLY), 1)
        return _found().cuLaunchKernelEx(ctypes.byref(how), function, None, parameters.extra)

    status = call()
    if status in _WRONG_CONTEXT:  # a thread of which torch has not yet asked anything
        _enter(device)
        status = call()
    _checked(status, "cuLaunchKernelEx" if early else "cuLaunchKernel")


def _enter(device: int) -> None:
    """Make torch's context of `device`, the primary one, current in this thread."""
    torch.cuda.init()
    _checked(_found().cuCtxSetCurrent(_context(device)), "cuCtxSetCurrent")


@cache
def _context(device: int) -> ctypes.c_void_p:
    library = _found()
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _checked(library.cuInit(0), "cuInit")
    _checked(library.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    _checked(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return library


def _found() -> ctypes.CDLL:
    library = _library()
    assert library is not None, "asked for a launch where `missing` gives a reason"
    return library


def _checked(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _found().cuGetErrorString(status, ctypes.byref(text))
    raise CudaError(f"{what}: {(text.value or b'error').decode()} (CUDA driver error {status})")
