"""The Triton kernels of decode, norms, convolution, gated units and depth reads, in Triton's interpreter on the CPU.

The interpreter is chosen when Triton is imported, so each `interpreted_*.py` beside this file runs in a process of its
own. It shows faults of indexing, masking and arithmetic; races, miscompiled code and bfloat16 are for `tests/gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.ops.triton.available import missing

FILES = sorted(Path(__file__).parent.rglob("interpreted_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("interpreted_"))
def test_in_the_interpreter(file: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PERILUNE_OPS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout and "skipped" not in child.stdout, child.stdout[-2000:]
