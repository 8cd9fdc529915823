"""The folder of a disk tier: what others leave in it or do to it, and who may use it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_model import tiny_engine

from perilune.errors import ConfigError
from perilune.serve.request import SamplingParams
from perilune.serve.settings import EngineSettings
from perilune.serve.tiers import DiskTier
from perilune.serve.tiers.index import Prefix

PROMPT = "def main(" * 8
SIZES = (10_000, 100, 100)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def engine(folder: Path):
    """One whose cache outlives it in a folder."""
    return tiny_engine(settings=EngineSettings(unit=4, cache_bytes=2**23, host_bytes=2**22, disk=folder))


def ask(at) -> tuple[list[int], int]:
    """Tokens of an answer, and how many of the prompt were not run."""
    job = at.complete([PROMPT], GREEDY)
    return [token for delta in job for token in delta.token_ids], job.usage.cached_tokens


def test_a_damaged_head_is_no_prefix_of_another_length(tmp_path):
    """Bytes of the states are whole; how many tokens they stand behind is not."""
    first = engine(tmp_path)
    answer, _ = ask(first)
    first.close()
    for path in tmp_path.glob("*.state"):
        magic, head, rest = path.read_bytes().split(b"\n", 2)
        about = json.loads(head)
        path.write_bytes(b"\n".join([magic, json.dumps(about | {"depth": about["depth"] - 4}).encode(), rest]))
    second = engine(tmp_path)
    assert ask(second) == (answer, 0)
    assert second.metrics().tiers["disk_damaged_total"] > 0
    second.close()


@pytest.mark.parametrize(
    "head",
    [b"", b"[]", b"{}", b'{"depth": 8}', b'{"depth": 8, "pages": 3}', b'{"depth": "x", "pages": []}', b"[" * 99_999],
)
def test_a_head_that_says_nothing_is_removed(tmp_path, head):
    (tmp_path / "ab.state").write_bytes(b"perilune tier 2\n" + head + b"\n0\n")
    assert len(DiskTier(tmp_path, *SIZES).index) == 0
    assert not (tmp_path / "ab.state").exists()


def test_files_of_others_are_left_alone(tmp_path):
    mine = ["notes.tokens", "a.state", "paper.part", "README"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "ab.state").mkdir()  # can be neither read nor removed
    disk = DiskTier(tmp_path, *SIZES)
    disk.put(Prefix(b"one", 8, (b"page",)), {b"page": b"p" * 100}, [b"s" * 100])
    assert len(disk.index) == 1 and all((tmp_path / name).read_text() == "mine" for name in mine)


def test_a_request_goes_on_whatever_reading_says(tmp_path, monkeypatch):
    first = engine(tmp_path)
    answer, _ = ask(first)
    first.close()

    def fail(*_) -> bool:
        raise MemoryError("an injected fault")

    second = engine(tmp_path)
    monkeypatch.setattr(DiskTier, "get", fail)
    heard: list[list[int]] = []
    asking = threading.Thread(target=lambda: heard.append(ask(second)[0]), daemon=True)
    asking.start()
    asking.join(60)
    assert heard == [answer]
    second.close()


def test_one_process_at_a_time(tmp_path):
    """A second one is refused while the first lives, even if it never served; afterwards it is not."""
    program = f"""
from pathlib import Path
from perilune.serve.tiers import DiskTier
disk = DiskTier(Path({str(tmp_path)!r}), 10_000, 100, 100)
print("open", flush=True)
input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="another process uses it"):
            DiskTier(tmp_path, *SIZES)
    finally:
        other.kill()
        other.communicate(timeout=60)
    DiskTier(tmp_path, *SIZES).close()


def test_an_engine_that_nobody_asked_gives_its_folder_back(tmp_path):
    unused = engine(tmp_path)
    unused.close()
    assert unused.core.tiers._disk._claim.closed


def test_a_server_that_must_end_now_writes_no_further(tmp_path, monkeypatch):
    """The first signal lets everything cached reach the disk; the second one comes while the first prefix is written."""
    at_work = engine(tmp_path)
    for prompt in ("first", "second", "third"):
        list(at_work.complete([prompt * 8], GREEDY))
    writing, told, put, written = threading.Event(), threading.Event(), DiskTier.put, []

    def slow(disk: DiskTier, prefix: Prefix, *contents) -> None:
        written.append(prefix)
        writing.set()
        assert told.wait(60)
        put(disk, prefix, *contents)

    monkeypatch.setattr(DiskTier, "put", slow)
    closing = threading.Thread(target=lambda: at_work.close(None), daemon=True)
    closing.start()
    assert writing.wait(60)
    at_work.close(0.0, keep=False)
    told.set()
    closing.join(60)
    assert not closing.is_alive() and len(written) == 1
    assert len(list(tmp_path.glob("*.state"))) == 1, "what is whole stays"
