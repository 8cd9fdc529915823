"""`perilune sandbox serve` and the commands that speak to it, as a user runs them; a service that is killed and one that is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perilune.cli.main import main
from perilune.sandbox.home import Home

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")

TESTED_DRIVERS = ("proc",)
KEY = "a-key-of-this-test"


@pytest.fixture
def service(driver, home: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "perilune", "sandbox", "serve", "--port", "0", "--json", "--sync", "none", *args],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home), "PERILUNE_SANDBOX_KEY": KEY},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["url"]

    yield start
    for process in started:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
    Home(home).reap()  # What killed services leave is the next owner's to clear away.


@pytest.fixture
def cli(command, monkeypatch):
    """A command that speaks to the service at a URL."""
    monkeypatch.setenv("TOKEN", "long-enough-secret")

    def call(url: str, *args: str, key: str = KEY, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return command(*args, stdin=stdin, env={"PERILUNE_SANDBOX_URL": url, "PERILUNE_SANDBOX_KEY": key})

    return call


def test_commands_against_a_service_that_is_killed_and_started_again(service, driver, cli):
    process, url = service()
    done = cli(url, "run", "--driver", driver, "--", "sh", "-c", "cat; echo err >&2; exit 9", stdin=b"in\xffput")
    assert (done.stdout, done.stderr, done.returncode) == (b"in\xffput", b"err\n", 9)
    kept = cli(url, "run", "--driver", driver, "--name", "job", "--", "sh", "-c", "echo 1 > /workspace/n")
    assert (kept.returncode, kept.stderr) == (0, b"kept: job\n")
    assert cli(url, "resume", "job", "--", "cat", "/workspace/n").stdout == b"1\n"
    fork = cli(url, "fork", "job").stdout.decode().strip()
    snapshot = cli(url, "snapshot", "job").stdout.decode().strip()
    paused = cli(url, "pause", fork).stdout
    assert paused.startswith(b"snap-") and cli(url, "pause", fork).stdout == paused and fork == "job-1"
    listed = json.loads(cli(url, "ps", "--json").stdout)
    assert {row["name"]: row["state"] for row in listed["sandboxes"]} == {"job": "running", fork: "paused"}
    assert snapshot in {row["id"] for row in listed["snapshots"]} and listed["usage"]["held"] == 1
    text = cli(url, "ps").stdout.decode()
    assert "job" in text and "memory:" in text and "1 with a machine, 1 paused" in text
    refused = cli(url, "ps", key="wrong")
    assert refused.returncode == 1 and b"a valid API key is needed" in refused.stderr
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    gone = cli(url, "ps")
    assert gone.returncode == 1 and b"cannot be reached" in gone.stderr
    process, url = service()
    listed = json.loads(cli(url, "ps", "--json").stdout)
    assert {row["name"]: row["state"] for row in listed["sandboxes"]} == {"job": "lost", fork: "paused"}
    lost = cli(url, "resume", "job", "--", "true")
    assert lost.returncode == 1 and f"last snapshot is {snapshot}".encode() in lost.stderr
    for name in (fork, snapshot):
        assert cli(url, "resume", name, "--", "cat", "/workspace/n").stdout == b"1\n", name
    assert cli(url, "rm", fork, "--lost").returncode == 0
    assert json.loads(cli(url, "ps", "--json").stdout)["sandboxes"] == []
    assert json.loads(cli(url, "doctor", "--json").stdout)["drivers"]


def test_a_service_that_is_stopped_leaves_its_sandboxes_for_the_next(service, driver, cli):
    process, url = service("--idle", "0")
    cli(url, "run", "--driver", driver, "--name", "job", "--", "sh", "-c", "echo 1 > /workspace/n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    _, url = service()
    assert json.loads(cli(url, "ps", "--json").stdout)["sandboxes"][0]["state"] == "parked"
    assert cli(url, "resume", "job", "--", "cat", "/workspace/n").stdout == b"1\n"


def test_secrets_reach_a_command_and_no_snapshot(service, driver, cli):
    _, url = service()
    write = ["--secret", "TOKEN", "--", "sh", "-c", "echo $TOKEN > /workspace/t; test $TOKEN = long-enough-secret"]
    assert cli(url, "run", "--driver", driver, "--name", "job", *write).returncode == 0
    refused = cli(url, "snapshot", "job")
    assert refused.returncode == 1 and b"/workspace/t holds the secret TOKEN" in refused.stderr
    assert cli(url, "resume", "job", "--", "rm", "/workspace/t").returncode == 0
    assert cli(url, "snapshot", "job").returncode == 0


def test_watching_prints_a_line_each_second_until_it_is_stopped(service, driver):
    _, url = service()
    env = {**os.environ, "PERILUNE_SANDBOX_URL": url, "PERILUNE_SANDBOX_KEY": KEY}
    command = [sys.executable, "-m", "perilune", "sandbox", "ps", "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as watching:
        assert watching.stdout is not None
        for _ in range(2):
            assert json.loads(watching.stdout.readline())["sandboxes"] == []
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), "can be reached by other machines"),
        (("--warm", "proc"), "DRIVER=N"),
        (("--warm", "teleport=1"), "DRIVER=N"),
        (("--memory", "much"), "no size"),
        (("--overcommit", "0.5"), "1 or more"),
        (("--overcommit", "nan"), "overcommit=nan must not be below zero"),
        (("--lifetime", "nan"), "lifetime_seconds=nan must not be below zero"),
        (("--store", "0"), "holds nothing"),
        (("--no-auth", "--api-key", "k"), "exclude each other"),
        (("--sync", "never"), "is not one of"),
    ],
)
def test_mistakes_are_told(home, monkeypatch, capsys, args, words):
    monkeypatch.delenv("PERILUNE_SANDBOX_KEY", raising=False)
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))
    assert main(["sandbox", "serve", "--port", "0", *args]) == 2
    assert words in capsys.readouterr().err
