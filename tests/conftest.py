"""What every test shares: one thread, seeds from the test's name, counts that a soak raises, the GPU gate."""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: the suite runs one worker a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
SOAK_RECORD = ROOT / "runs" / "soak" / "passed.json"

settings.register_profile(
    "suite",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("soak", parent=settings.get_profile("suite"), max_examples=2000, derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="full counts for the checks marked soak")
    parser.addoption("--soak-again", action="store_true", help="also those that passed already at this version")


def pytest_configure(config: pytest.Config) -> None:
    # The background of a shell ignores the one, nohup the other; programs under test would inherit it.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    settings.load_profile("soak" if config.getoption("--soak") else "suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU. Property tests belong to a soak; it goes on behind the checks that passed before."""
    soaking = config.getoption("--soak")
    passed = {} if config.getoption("--soak-again") else _passed()
    for item in items:
        folder = item.path.parent.name
        if folder in ("gpu", "dist"):
            item.add_marker(getattr(pytest.mark, folder))
        if hasattr(getattr(item, "function", None), "hypothesis"):
            item.add_marker(pytest.mark.soak)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
        if soaking and item.get_closest_marker("soak") and passed.get(item.nodeid) == _version_of_tree():
            item.add_marker(pytest.mark.skip(reason="passed already at this version; --soak-again repeats it"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_tree: list[int] = []


def _version_of_tree() -> int:
    """Checksum of the package's and the tests' sources: a passed soak counts only for exactly these."""
    if not _tree:
        total = 0
        for folder in ("perilune", "tests"):
            for path in sorted((ROOT / folder).rglob("*")):
                if path.suffix in (".py", ".c", ".h"):
                    total = zlib.crc32(path.read_bytes(), total)
        _tree.append(total)
    return _tree[0]


def _passed() -> dict[str, int]:
    try:
        return json.loads(SOAK_RECORD.read_text())
    except (OSError, ValueError):
        return {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = (yield).get_result()
    if report.when == "call" and report.passed and item.config.getoption("--soak") and item.get_closest_marker("soak"):
        record = _passed() | {item.nodeid: _version_of_tree()}
        SOAK_RECORD.parent.mkdir(parents=True, exist_ok=True)
        part = SOAK_RECORD.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1))
        part.replace(SOAK_RECORD)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random numbers of a test depend on its name alone, never on which tests ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    for name in ("torch", "numpy"):
        module = sys.modules.get(name)
        if module is not None:
            module.manual_seed(seed) if name == "torch" else module.random.seed(seed)
    import random

    random.seed(seed)


@pytest.fixture
def count(request: pytest.FixtureRequest):
    """`count(full=1_000_000, reduced=2_000)`: how many times to repeat; full under a soak, else reduced and reported."""

    def choose(*, full: int, reduced: int) -> int:
        if request.config.getoption("--soak"):
            return full
        request.node.user_properties.append(("reduced", [reduced, full]))
        return reduced

    return choose


def pytest_terminal_summary(terminalreporter) -> None:
    """Say which checks ran with reduced counts, so that a green suite does not claim more than it did."""
    rows = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []) if getattr(report, "when", "") == "call" else []:
                if name == "reduced":
                    rows.append(f"{report.nodeid}: {value[0]:,} of {value[1]:,}")
    if rows:
        terminalreporter.section("reduced counts (full: bootstrap.py soak)")
        for row in sorted(rows):
            terminalreporter.write_line(row)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills every torch.empty with NaN, so an element that nobody writes shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
