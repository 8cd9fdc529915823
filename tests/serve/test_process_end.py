"""A process may end, or be forked, while its engine is at work: it ends as its program did, and what was cached is on the
disk."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_model import tiny_engine

from perilune.serve.engine_thread import _end_threads
from perilune.serve.llm import LLM
from perilune.serve.request import SamplingParams
from perilune.serve.settings import EngineSettings

PROMPT = "def main(" * 8
HEAD = """
import os, sys, threading
from pathlib import Path
import torch
from test_process_end import PROMPT, engine
from perilune.serve.llm import LLM
from perilune.serve.request import SamplingParams
torch.set_num_threads(1)
at_work = engine(Path(sys.argv[1]))
"""
ENDS = """
list(at_work.complete([PROMPT], SamplingParams(temperature=0.0, max_tokens=4)))
print(next(iter(at_work.complete([PROMPT], SamplingParams(temperature=0.0, max_tokens=8000)))).text)
"""
GOES_ON = """
def ask():
    threading.main_thread().join()
    [result] = LLM(at_work).generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=4))
    print(result.usage.cached_tokens, len(result.outputs[0].token_ids))
threading.Thread(target=ask).start()
"""
FORKS = """
params = SamplingParams(temperature=0.0, max_tokens=4)
running = iter(at_work.complete([PROMPT], SamplingParams(temperature=0.0, max_tokens=8000)))
next(running)
child = os.fork()
if child == 0:
    try:
        LLM(at_work).generate([PROMPT], params)
    except Exception as error:
        print(type(error).__name__, str(os.getppid()) in str(error), at_work.closed, flush=True)
    running.close()
    at_work.close()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(LLM(at_work).generate([PROMPT], params)))
"""


def engine(disk: Path):
    """One that keeps its cache in a folder."""
    return tiny_engine(settings=EngineSettings(unit=4, cache_bytes=2**23, host_bytes=2**22, disk=disk))


def end_of(program: str, folder: Path) -> tuple[int, str, str]:
    """Exit code and what was said by a program of its own, whose engine is `at_work`."""
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + program, str(folder)],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_a_program_may_end_while_its_engine_computes(tmp_path):
    code, _, complaints = end_of(ENDS, tmp_path)
    assert (code, complaints) == (0, "")
    with LLM(engine(tmp_path)) as after:
        (result,) = after.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=4))
    assert result.usage.cached_tokens >= 64


def test_threads_ask_on_when_the_main_one_has_ended(tmp_path):
    """Executors of the interpreter take no work then; what is on the disk is read all the same."""
    with contextlib.closing(engine(tmp_path)) as before:
        LLM(before).generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=4))
    assert end_of(GOES_ON, tmp_path) == (0, "68 4\n", "")


def test_a_fork_is_told_that_its_engine_is_elsewhere(tmp_path):
    assert end_of(FORKS, tmp_path) == (0, "EngineClosed True True\n3 1\n", "")


def test_an_interrupt_while_the_first_request_is_handed_over_loses_that_request_alone(tmp_path, monkeypatch):
    """Ctrl-C before the engine's thread runs: the next request starts it, and the engine can be closed in between."""

    def interrupted(_thread) -> None:
        raise KeyboardInterrupt

    at_work, unlucky = engine(tmp_path / "one"), engine(tmp_path / "two")
    with monkeypatch.context() as signals:
        signals.setattr(threading.Thread, "start", interrupted)
        for one in (at_work, unlucky):
            with pytest.raises(KeyboardInterrupt):
                LLM(one).generate([PROMPT], SamplingParams(max_tokens=1))
    with monkeypatch.context() as program:
        program.setattr(threading, "enumerate", lambda: [at_work.core._thread])  # known, though it never began
        _end_threads()
    assert at_work.closed is False
    unlucky.close()
    (result,) = LLM(at_work).generate([PROMPT], SamplingParams(max_tokens=1))
    assert len(result.outputs[0].token_ids) == 1 and at_work.metrics().running == 0
    at_work.close()
