"""A process may end while its engine is at work: it ends as its program did, and what was cached is on the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_model import tiny_engine

from perilune.serve.llm import LLM
from perilune.serve.request import SamplingParams
from perilune.serve.settings import EngineSettings

PROMPT = "def main(" * 8
PROGRAM = """
import sys
from pathlib import Path
import torch
from test_process_end import PROMPT, engine
from perilune.serve.request import SamplingParams
torch.set_num_threads(1)
at_work = engine(Path(sys.argv[1]))
list(at_work.complete([PROMPT], SamplingParams(temperature=0.0, max_tokens=4)))
print(next(iter(at_work.complete([PROMPT], SamplingParams(temperature=0.0, max_tokens=8000)))).text)
"""


def engine(disk: Path):
    """One that keeps its cache in a folder."""
    return tiny_engine(settings=EngineSettings(unit=4, cache_bytes=2**23, host_bytes=2**22, disk=disk))


def test_a_program_may_end_while_its_engine_computes(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    with LLM(engine(tmp_path)) as after:
        (result,) = after.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=4))
    assert result.usage.cached_tokens >= 64
