"""Before a run of several GPU test files, their kernels are compiled by many processes at once.

Compiling takes far longer than the tests themselves, one core a process. So every process runs its share of the tests, with
whatever result, to leave the kernels in the caches on disk; then the run that counts begins. A single file, a run under
pytest-xdist (which is such a run already) and PERILUNE_COMPILE_AHEAD=0 do without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from perilune.bench.precompile import end_within

HERE = Path(__file__).parent
SWITCH = "PERILUNE_COMPILE_AHEAD"
PROCESSES = 16
SECONDS = 240  # what is not compiled by then is compiled on the way
LONG = ("peer", "serve", "vision", "engine", "mx_gpu", "model", "short_convolution", "shared_reads")  # in a test's name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: several workers would otherwise wait for the one that began them last."""
    items.sort(key=lambda item: item.path.parent != HERE or not any(word in item.nodeid for word in LONG))


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path.parent == HERE]
    if os.environ.get(SWITCH) == "0" or "PYTEST_XDIST_WORKER" in os.environ or len({item.path for item in items}) < 2:
        return
    parts = min(PROCESSES, os.cpu_count() or 1)
    start, running = time.monotonic(), []
    for part in range(parts):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(i.nodeid for i in items[part::parts]),
        ]
        running.append(
            subprocess.Popen(
                command, cwd=request.config.rootpath, env=os.environ | {SWITCH: "0"}, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
    end_within(start + SECONDS - time.monotonic(), running)
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.write_line(f"compiled ahead in {parts} processes, {time.monotonic() - start:.0f} s")


@pytest.fixture
def poisoned_memory_warned() -> Iterator[None]:
    """`poisoned_memory` beside references that use operations which it would refuse."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
