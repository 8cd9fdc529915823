"""The page on sandboxes: its Python runs, and its commands are real ones with the results that it tells."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perilune.cli.main import main
from perilune.sandbox import Sandboxes
from perilune.sandbox.fleet import Fleet, FleetSandbox
from perilune.sandbox.pool import Pool

TESTED_DRIVERS = ("proc",)

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/sandbox.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def with_python(driver):
    if not any(Path(folder, "python3").exists() for folder in ("/usr/bin", "/usr/local/bin")):
        pytest.skip("the host has no python3 that a guest would see")


def test_the_pages_python_runs(with_python, home, monkeypatch, capsys):
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))
    local = [block for block in blocks("python") if "Remote" not in block and "Fleet" not in block]
    names: dict = {}
    exec(local[0], names)
    assert capsys.readouterr().out == "0 b'2\\n' False False\n" * 2
    exec(local[1], names)
    assert capsys.readouterr().out == "({'tries': 1}, 8, 7)\n"
    exec(local[2], names)
    assert names["log"].steps() == [0]


def test_the_pages_service_runs(with_python, home, monkeypatch, capsys):
    pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
    commands, curl = blocks("sh")
    lines = [line for line in commands.splitlines() if not line.startswith("export")]
    assert lines[0] == "perilune sandbox serve --port 8010 &"
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))
    monkeypatch.setenv("PERILUNE_SANDBOX_KEY", "choose-one")
    serve = [sys.executable, "-m", "perilune", "sandbox", "serve", "--port", "0", "--json"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            monkeypatch.setenv("PERILUNE_SANDBOX_URL", json.loads(service.stdout.readline())["url"])
            said = {}
            for line in lines[1:]:
                done = subprocess.run(
                    [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True, timeout=120
                )
                assert done.returncode == 0, (line, done.stderr)
                said[line] = done.stdout
            assert said["perilune sandbox resume job -- cat /workspace/n"] == "1\n"
            assert "job" in said["perilune sandbox ps"]
            exec(next(block for block in blocks("py") if "Remote" in block), {})
            assert capsys.readouterr().out == "b'got it\\n'\n"
            if shutil.which("curl"):
                done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=120)
                assert json.loads(done.stdout)["state"] == "running", done
        finally:
            service.terminate()
            assert service.wait(60) == 0


@pytest.fixture
def shell(home, monkeypatch, capfd) -> Iterator[Callable[[str], str]]:
    """Runs a line of the page as a shell would, in this process; gives what it said on stdout."""
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))
    before = signal.getsignal(signal.SIGTERM)

    def run(line: str) -> str:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["perilune", "sandbox"]
        assert main(words[1:]) == 0, (line, capfd.readouterr().err)
        return capfd.readouterr().out

    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield run
    signal.signal(signal.SIGTERM, before)


def test_the_walk_through_with_a_judge_runs_at_a_service_as_it_does_here(with_python, shell, home, monkeypatch):
    api = pytest.importorskip("perilune.sandbox.api", reason="the extra 'serve' is not installed")
    (walk,) = (block for block in blocks("console") if "fork candidate" in block)
    with Pool(Sandboxes(home, sync="none")) as pool, api.serve_in_thread(pool) as served:
        monkeypatch.setenv("PERILUNE_SANDBOX_URL", served.url)
        said = [shell(line) for line in walk.splitlines()]
        assert said[1:4] == ["candidate-1\ncandidate-2\n", "2\n", "solution.py\n"] and pool.records() == []


def test_the_pages_fleet_names_what_there_is():
    block = next(block for block in blocks("py") if "Fleet" in block)
    assert "Fleet(address=" in block
    calls = {*re.findall(r"(?:fleet|box)\.(\w+)\(", block)}
    assert calls == {"create", "checkpoint", "resume"} and all(
        hasattr(Fleet, name) or hasattr(FleetSandbox, name) for name in calls
    )


def test_the_pages_commands_run(with_python, shell):
    said = []
    for line in "\n".join(blocks("console")).splitlines():
        if not line or line.startswith("perilune sandbox shell"):
            continue
        out, comment = shell(line), line.partition("  #")[2].strip()
        words = shlex.split(line, comments=True)
        if words[2] in ("resume", "fork") or words[3:5] == ["task-18", "--"] and words[5] == "cat":
            said.append(out)
            assert not comment or comment.replace(", ", "\n") == out.strip()
    assert said == ["1\n", "candidate-1\ncandidate-2\n", "2\n", "solution.py\n", "1\n"]
