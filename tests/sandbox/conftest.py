"""Sandboxes for tests: every driver whose probe passes, in a folder of the test's own; skipped with the probe's reason otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.sandbox import Limits, Probe, Sandbox, Sandboxes, Spec
from perilune.sandbox.drivers import DRIVERS

SMALL = Limits(memory_bytes=256 << 20, disk_bytes=32 << 20, processes=48, output_bytes=1 << 20, exec_seconds=60)


@pytest.fixture(scope="session")
def probes(tmp_path_factory) -> dict[str, Probe]:
    with Sandboxes(tmp_path_factory.mktemp("probes"), sync="none") as sandboxes:
        return {name: sandboxes.probe(name) for name in DRIVERS}


@pytest.fixture(params=list(DRIVERS))
def driver(request, probes) -> str:
    probe = probes[request.param]
    # A kernel that refuses a namespace or a mount is a reason; a program that ran and found something wrong is a fault.
    assert probe.passed or "a program in the sandbox ended with" not in probe.reason, probe.reason
    if not probe.passed:
        pytest.skip(f"driver {probe.driver}: {probe.reason}")
    return probe.driver


@pytest.fixture(scope="session")
def templates(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("templates")


@pytest.fixture
def home(tmp_path: Path, templates: Path) -> Path:
    """A folder for sandboxes; the templates in it are built once for all tests."""
    (tmp_path / "home/proc").mkdir(parents=True)
    (tmp_path / "home/proc/templates").symlink_to(templates)
    return tmp_path / "home"


@pytest.fixture
def sandboxes(driver, home: Path) -> Iterator[Sandboxes]:
    with Sandboxes(home, sync="none") as made:
        yield made


@pytest.fixture
def box(sandboxes: Sandboxes, driver: str) -> Sandbox:
    return sandboxes.create(Spec(limits=SMALL), driver=driver)


@pytest.fixture
def python_box(sandboxes: Sandboxes, driver: str) -> Sandbox:
    """A sandbox that also shows this interpreter's folder."""
    return sandboxes.create(Spec(limits=SMALL, trees=(sys.base_prefix,)), driver=driver)


@pytest.fixture
def python() -> str:
    """This interpreter as a guest with `python_box`'s tree finds it."""
    return f"{Path(sys.base_prefix).resolve()}/bin/python3"
