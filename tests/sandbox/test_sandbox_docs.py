"""The page on sandboxes: its Python runs, and its commands are real ones with the results that it tells."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    first, second = blocks("python")
    names: dict = {}
    exec(first, names)
    assert capsys.readouterr().out == "0 b'2\\n' False False\n" * 2
    exec(second, names)
    assert names["log"].steps() == [0]


def test_the_pages_commands_run(with_python, home):
    said = []
    for line in "\n".join(blocks("console")).splitlines():
        if not line:
            continue
        command, _, comment = line.partition("  #")
        words = shlex.split(command)
        assert words[:2] == ["perilune", "sandbox"]
        if words[2] in ("shell",):
            continue
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
            env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home)},
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)
        if words[2] in ("resume", "fork"):
            said.append(done.stdout)
            assert not comment or comment.strip().replace(", ", "\n") == done.stdout.strip()
    assert said == ["1\n", "candidate-1\ncandidate-2\n", "2\n", "solution.py\n"]
