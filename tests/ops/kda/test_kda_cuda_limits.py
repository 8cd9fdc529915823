"""What a multiprocessor of Hopper holds, for every launch that can be chosen; and that early kernels touch nothing before they wait."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

import triton

from perilune.ops.cuda import Kernel, nvrtc
from perilune.ops.kda.cuda import backward, decode, fold, prepare, scan, scan_backward, summary, verify

SHARED_OF_BLOCK, SHARED_OF_MULTIPROCESSOR, RESERVED = 227 << 10, 228 << 10, 1 << 10  # bytes; reserved for each block
THREADS_OF_MULTIPROCESSOR = 2048
DIMS, FLAGS = (64, 128), (False, True)
INDEXES = (None, torch.int32, torch.int64)
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def every_kernel() -> Iterator[Kernel]:
    """All macros that calls lead to; taps up to those of the longest convolution that is taken."""
    for key_dim in DIMS:
        yield from (prepare.kernel(key_dim, *flags) for flags in product(FLAGS, repeat=3))
        yield from (fold.kernel(key_dim, reverse) for reverse in FLAGS)
        for value_dim in DIMS:
            yield summary.kernel(key_dim, min(key_dim, value_dim))
            for flag in FLAGS:
                yield scan.kernel(key_dim, value_dim, flag)
                yield scan_backward.kernel(key_dim, value_dim, flag)
            yield from (backward.kernel(key_dim, value_dim, *flags) for flags in product(FLAGS, repeat=7))
            for taps, index, flags in product((2, 4, 8), INDEXES, product(FLAGS, repeat=3)):
                yield verify.kernel(key_dim, value_dim, taps, *flags, index, torch.int64)
                for by_head, rank in product(FLAGS, (None, 32, 128)):
                    yield decode.kernel(key_dim, value_dim, taps, *flags, index, by_head, rank)


def blocks_of(kernel: Kernel) -> int:
    """How many the source asks to fit a multiprocessor."""
    found = re.search(r"KERNEL\(THREADS, (\w+)\)", kernel.source.read_text())
    assert found is not None
    return int(found[1]) if found[1].isdigit() else kernel.defines[found[1]]


def test_every_launch_that_can_be_chosen_fits() -> None:
    seen = 0
    for kernel in every_kernel():
        what, blocks = (kernel.entry, kernel.defines), blocks_of(kernel)
        assert kernel.shared_bytes <= SHARED_OF_BLOCK, what
        assert blocks * (kernel.shared_bytes + RESERVED) <= SHARED_OF_MULTIPROCESSOR, what
        assert blocks * kernel.threads <= THREADS_OF_MULTIPROCESSOR and kernel.threads <= 1024, what
        seen += 1
    assert seen > 1000


EARLY = [
    prepare.kernel(128, False, False, True), prepare.kernel(128, False, True, False), scan.kernel(128, 128, True),
    summary.kernel(128, 128), fold.kernel(128, False), fold.kernel(128, True), scan_backward.kernel(128, 128, False),
    decode.kernel(128, 128, 4, True, True, True, torch.int64, True, 128),
]  # fmt: skip


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton brings no nvdisasm")
@pytest.mark.parametrize("kernel", EARLY, ids=lambda kernel: kernel.entry)
def test_an_early_kernel_reads_and_writes_nothing_before_it_waits(kernel: Kernel) -> None:
    """The kernel ahead may still write what it reads, or read what it writes. Behind the wait no load may take the way that misses
    what other kernels wrote meanwhile (LDG.CONSTANT)."""
    cubin, _ = kernel.compiled()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run(
            [DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True, timeout=120
        ).stdout
    before, waits, _ = code.partition("ACQBULK")
    assert kernel.early and waits, "it never waits"
    index = kernel.entry == "decode"  # which it reads past the L1 cache to know what to ask for, and no more
    assert not re.search(r"\b(STG|ST\.E|RED|ATOM|LDGSTS|EXIT)\b", before)
    loads = re.findall(r"\b(?:LDG|LD)\.\S+", before)
    assert all(index and "STRONG" in load for load in loads), loads
    assert "CONSTANT" not in " ".join(re.findall(r"\bLDG\.\S+", code))
