"""Sandboxes for tests: the drivers whose probe passes, in a folder of the test's own; skipped with the probe's reason otherwise.

A file is run with every driver, or with those that its `TESTED_DRIVERS` names where it is about something that they share.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.cli.main import main
from perilune.sandbox import Limits, Probe, Sandbox, Sandboxes, Spec
from perilune.sandbox.drivers import DRIVERS

SMALL = Limits(memory_bytes=256 << 20, disk_bytes=32 << 20, processes=48, output_bytes=1 << 20, exec_seconds=60)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "driver" in metafunc.fixturenames:
        names = getattr(metafunc.module, "TESTED_DRIVERS", tuple(DRIVERS))
        metafunc.parametrize("driver", [name for name in names if name in DRIVERS], indirect=True)


@pytest.fixture(scope="session")
def probe(tmp_path_factory, templates: Path) -> Iterator[Callable[[str], Probe]]:
    """What a driver's probe finds here; looked at once, and only where a test wants the driver."""
    with Sandboxes(_home(tmp_path_factory.mktemp("probes"), templates), sync="none") as sandboxes:
        yield sandboxes.probe


@pytest.fixture
def driver(request, probe) -> str:
    found = probe(request.param)
    # A kernel that refuses a namespace or a mount is a reason; a program that ran and found something wrong is a fault.
    assert found.passed or "a program in the sandbox ended with" not in found.reason, found.reason
    if not found.passed:
        pytest.skip(f"driver {found.driver}: {found.reason}")
    return found.driver


@pytest.fixture(scope="session")
def templates(tmp_path_factory) -> Path:
    """What drivers build once; with the machines' templates it is what a session boots, whatever number of workers runs it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sandbox-templates"
    folder.mkdir(exist_ok=True)
    return folder


def _home(folder: Path, templates: Path) -> Path:
    for name in ("proc", "qemu"):
        (folder / name).mkdir(parents=True)
        (templates / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "templates").symlink_to(templates / name)
    return folder


@pytest.fixture
def home(tmp_path: Path, templates: Path) -> Path:
    """A folder for sandboxes; the templates in it are built once for all tests."""
    return _home(tmp_path / "home", templates)


@pytest.fixture
def sandboxes(driver, home: Path) -> Iterator[Sandboxes]:
    with Sandboxes(home, sync="none") as made:
        yield made


@pytest.fixture
def spec(driver: str) -> Spec:
    """A small sandbox; a machine has the default memory, so that it starts from the template that its probe has booted."""
    return Spec(limits=replace(SMALL, memory_bytes=Limits().memory_bytes) if driver == "qemu" else SMALL)


@pytest.fixture
def box(sandboxes: Sandboxes, driver: str, spec: Spec) -> Sandbox:
    return sandboxes.create(spec, driver=driver)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory, templates: Path) -> Iterator[tuple[Sandboxes, dict[str, Sandbox]]]:
    """Sandboxes of a whole file, one a driver."""
    with Sandboxes(_home(tmp_path_factory.mktemp("lasting"), templates), sync="none") as made:
        yield made, {}


@pytest.fixture
def shared_box(lasting: tuple[Sandboxes, dict[str, Sandbox]], driver: str, spec: Spec) -> Sandbox:
    """A sandbox for tests that neither save nor end it, nor mind what others left in it; a machine takes its time to make."""
    made, boxes = lasting
    if driver not in boxes or not boxes[driver].alive():
        boxes[driver] = made.create(spec, driver=driver)
    return boxes[driver]


@pytest.fixture
def python_box(sandboxes: Sandboxes, driver: str, spec: Spec) -> Sandbox:
    """A sandbox with a Python: this interpreter's folder, or the distribution's in a machine's image."""
    if driver == "docker":
        pytest.skip("docker: the small image that is made for tests has no Python")
    inside = {"template": "python", "limits": SMALL} if driver == "qemu" else {"trees": (sys.base_prefix,)}
    return sandboxes.create(replace(spec, **inside), driver=driver)


@pytest.fixture
def python(driver: str) -> str:
    """The interpreter as a guest of `python_box` finds it."""
    return "python3" if driver == "qemu" else f"{Path(sys.base_prefix).resolve()}/bin/python3"


@pytest.fixture
def command(home: Path, monkeypatch, capfdbinary) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """`perilune sandbox` in this process, which is started by then: arguments, its input and its environment; gives what a shell sees."""
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))

    def call(*args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        with tempfile.TemporaryFile() as given, monkeypatch.context() as patch:
            given.write(stdin)
            given.seek(0)
            patch.setattr(sys, "stdin", io.TextIOWrapper(given))
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            try:
                code = main(["sandbox", *args])
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        out, err = capfdbinary.readouterr()
        return subprocess.CompletedProcess(args, code, out, err)

    return call
