"""Compile for sm_90 what a call would launch, without a GPU: Triton and ptxas need none.

`compiled(call)` makes the call on CPU tensors with every launch replaced by a compilation for the launch's arguments, as
Triton would specialise them on a device. The interpreter accepts much that the compiler refuses: a branch that gives a
name another shape, a function whose returns differ, a number that became a constant.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1", torch.int16: "*i16", torch.uint8: "*u8", torch.float64: "*fp64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "maxnreg")
_DIVISIBLE = [["tt.divisibility", 16]]


class Compiled(NamedTuple):
    """A kernel's name, registers of a thread, bytes spilled, warps, and bytes of shared memory."""

    name: str
    registers: int
    spilled: int
    warps: int
    shared: int


def compiled(call: Callable[[], object]) -> list[Compiled]:
    """Make the call; return what its launches compile to."""
    found: list[Compiled] = []

    def run(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        found.append(_compile(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        call()
    return found


def _compile(kernel: JITFunction, args: tuple, kwargs: dict) -> Compiled:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        signature[parameter.name] = _describe(value, (place,), constants, attributes, parameter.do_not_specialize)
    result = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 90, 32), options=options,
    )  # fmt: skip
    registers, spilled = _registers(result.asm["ptx"])
    return Compiled(kernel.fn.__name__, registers, spilled, result.metadata.num_warps, result.metadata.shared)


def _describe(value: object, path: tuple, constants: dict, attributes: dict, plain: bool) -> object:
    """The type of an argument in Triton's words; what the launcher would specialise goes into the two dictionaries."""
    if isinstance(value, tuple):
        return tuple(_describe(x, (*path, i), constants, attributes, plain) for i, x in enumerate(value))
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{value.block_shape}>"
    if isinstance(value, torch.Tensor):
        if value.data_ptr() % 16 == 0:
            attributes[path] = _DIVISIBLE
        return _TYPES[value.dtype]
    if value is None or (value == 1 and isinstance(value, int) and not plain):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    if value % 16 == 0 and not plain:
        attributes[path] = _DIVISIBLE
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _registers(ptx: str) -> tuple[int, int]:
    ptxas = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    spilled = re.search(r"(\d+) bytes spill stores", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spilled and registers, report
    return int(registers[1]), int(spilled[1])
