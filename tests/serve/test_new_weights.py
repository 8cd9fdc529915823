"""New weights for a running engine: nothing that other weights computed is used, in no memory that could hold it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import tiny_engine, tiny_model

from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams
from perilune.serve.settings import EngineSettings

PROMPT = "def main(" * 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def ask(engine: LocalEngine, job=None) -> tuple[list[int], int]:
    """Tokens of the answer, and how many of the prompt were not run."""
    job = job or engine.complete([PROMPT], GREEDY)
    return [token for delta in job for token in delta.token_ids], job.usage.cached_tokens


def change(engine: LocalEngine, seed: int) -> None:
    """Give it the weights of another model."""
    weights = tiny_model(seed, dtype=torch.float32).state_dict()
    engine.core.call(lambda: engine.core.runner.model.load_state_dict(weights))
    engine.admin.weights_changed(f"seed {seed}")


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Answers by the weights' seed, none of them cached."""
    return {seed: ask(tiny_engine(seed))[0] for seed in (1, 2)}


def test_a_disk_keeps_the_first_change_of_each_process_apart(tmp_path: Path, expected):
    """Both are change number one of the same model."""
    settings = EngineSettings(unit=4, cache_bytes=2**23, host_bytes=2**22, disk=tmp_path)

    def served(seed: int) -> tuple[list[int], int]:
        engine = tiny_engine(settings=settings)
        change(engine, seed)
        try:
            return ask(engine)
        finally:
            engine.close()

    assert served(1) == (expected[1], 0)
    assert served(2) == (expected[2], 0)
    assert served(1) == (expected[1], 68), "its own states are found again"


def test_a_request_made_before_and_run_behind_a_change_is_cached_for_the_new_weights(expected):
    engine = tiny_engine()
    early = engine.complete([PROMPT], GREEDY)
    change(engine, 1)
    assert ask(engine, early) == (expected[1], 0)
    assert ask(engine) == (expected[1], 68)
    engine.close()
