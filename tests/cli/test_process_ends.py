"""How a process of ours ends: closed pipes and streams, signals outside of training, few letters, and what the system refuses.

Each starts one process (or calls `main`) and looks at its exit code and at the last line that it said.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perilune.cli import main as entry
from perilune.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120


def start(code: str, *args: str, **options: Any) -> subprocess.Popen[Any]:
    """A process that runs `code` with the command line's arguments `args`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)


MAIN = "import sys; from perilune.cli.main import main; sys.exit(main())"


def test_a_reader_that_goes_away_ends_it_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    process = start(MAIN, "--help", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and err == b"", err.decode()


def test_a_full_disk_behind_stdout_is_told():
    with open("/dev/full", "wb") as full:
        process = start(MAIN, "tokenize", "--tokenizer", "byte", "x", stdout=full)
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and b"Traceback" not in err
    assert err.decode().splitlines()[-1].startswith("error: ") and b"No space left" in err


def test_with_closed_streams_the_first_file_is_not_stdout(tmp_path):
    """Else a file that is opened gets the number of stdout, and everything printed goes into it."""
    code = (
        "import os, sys; from perilune.cli import main as entry\n"
        "entry._run = lambda args: (open(args[0], 'w').close(), print('text'), os.write(1, b'raw'), 0)[-1]\n"
        "sys.exit(entry.main())"
    )
    target = tmp_path / "file"
    closed = f"import os; os.closerange(0, 2); os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {code!r}, {str(target)!r}])"
    process = start(closed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err.decode()
    assert target.read_bytes() == b""


def test_sigterm_ends_a_verb_like_ctrl_c():
    """So that what it holds is put away; by default the process would be gone at once."""
    code = (
        "import os, sys, signal; from perilune.cli import main as entry\n"
        "def verb(args):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('put away', flush=True)\n"
        "import importlib, types\n"
        "importlib.import_module = lambda name: types.SimpleNamespace(run=verb)\n"
        "sys.exit(entry.main())"
    )
    process = start(code, "doctor", stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (130, b"put away\n", b"interrupted\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_few_letters_shows_the_others_escaped(encoding):
    arguments = ("inspect", "--preset", "tiny", "--seq-lenn", "“3”")
    process = start(MAIN, *arguments, env={"PYTHONIOENCODING": encoding}, stdout=subprocess.PIPE)
    _, err = process.communicate(timeout=LIMIT)
    told = err.decode("ascii")
    assert process.returncode == 2 and "perhaps you meant --seq-len" in told and "\\u201c3\\u201d" in told


def refuse(error: BaseException):
    def run(args: list[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/a/file"), "error: the system refused /a/file: Permission denied"),
        (MemoryError(), "error: out of memory (Python)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "error: out of memory (DefaultCPU"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, words, monkeypatch, capsys):
    from perilune.cli import doctor

    monkeypatch.setattr(doctor, "run", refuse(error))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(words)


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    from perilune.cli import doctor

    monkeypatch.setattr(doctor, "run", refuse(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes"):
        main(["doctor"])


def test_libraries_are_heard_from_warnings_on(monkeypatch):
    """torch logs the state of its caches when a process ends, at the level of information."""
    monkeypatch.setattr(logging.getLogger("perilune"), "level", logging.NOTSET)
    entry._logging(logging.DEBUG)
    assert logging.getLogger("perilune.train").isEnabledFor(logging.DEBUG)
    assert logging.getLogger().level >= logging.WARNING


@pytest.mark.parametrize("ignored", [True, False])
def test_a_closed_terminal_saves_a_run_unless_it_is_to_be_ignored(ignored):
    from types import SimpleNamespace

    from perilune.train.callbacks import Interrupt

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        trainer = SimpleNamespace(stop_reason=None, saved_at_end=False, log=logging.getLogger("perilune.train"))
        callback = Interrupt()
        callback.on_start(trainer)
        signal.raise_signal(signal.SIGHUP)
        callback.on_close(trainer)
        assert trainer.stop_reason == (None if ignored else "interrupt")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_goes_on_when_nobody_reads_its_progress(monkeypatch):
    """`perilune train … 2>&1 | head` once ended the run, with all steps since the last checkpoint."""
    from perilune.cli.progress import ProgressLine

    tries = []

    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            tries.append(text)
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Unread())
    line = ProgressLine()
    line._say("first")
    line._say("second")
    assert tries == ["first"], "after the first failure nothing is said any more"


def test_bytes_that_are_no_text_are_refused_by_place():
    """Where the locale is strict about them; before, reading them was what failed."""
    code = (
        "import sys; from perilune.cli import main as entry; from perilune.tokenizer import ByteTokenizer\n"
        "entry._run = lambda args: ByteTokenizer().encode(sys.stdin.read())\n"
        "entry.main()"
    )
    process = start(code, stdin=subprocess.PIPE, env={"PYTHONIOENCODING": "utf-8:strict"})
    _, err = process.communicate(b"def \xff", timeout=LIMIT)
    assert "at character 4" in err.decode()
