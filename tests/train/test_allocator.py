"""The allocator keeps large blocks: none of them is mapped on its own any more, so none goes back when freed."""

import platform
import subprocess
import sys

import pytest

from perilune.train import allocator
from perilune.train.allocator import keep_large_blocks

COUNT_MAPPED = """
import ctypes, runpy, sys
keep_large_blocks = runpy.run_path(sys.argv[2])["keep_large_blocks"]  # the file alone: its package would import torch

class Info(ctypes.Structure):  # struct mallinfo2, mallinfo(3)
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
if sys.argv[1] == "kept":
    assert keep_large_blocks()
before = libc.mallinfo2().hblkhd
assert libc.malloc(1 << 26)
print(libc.mallinfo2().hblkhd - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt and mallinfo2 are glibc's")
@pytest.mark.parametrize(("how", "mapped"), [("as it is", True), ("kept", False)])
def test_a_large_block_is_mapped_on_its_own_only_before(how, mapped):
    command = [sys.executable, "-c", COUNT_MAPPED, how, allocator.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (int(done.stdout) >= 1 << 26) is mapped


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_large_blocks() is False
