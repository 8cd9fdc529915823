"""The engine's rows do what they say, on a model small enough to run them."""

from __future__ import annotations

import pytest

from perilune.bench import engine
from perilune.errors import ConfigError


@pytest.fixture(scope="module")
def model():
    return engine._model("tiny", "cpu")


def test_decoding_moves_every_sequence(model):
    step, bare = engine._decode(model, 3, 24)
    for run in (step, step, bare):
        run()


@pytest.mark.parametrize("beside", ["state", "alone", "pass"])
def test_first_tokens(model, beside):
    ours, theirs = engine._first_token(model, 40, 20, beside)
    for run in (ours, theirs, ours, theirs):  # more than once: what a call leaves behind must not fill the pool
        run()


def test_bursts_and_stops(model, monkeypatch):
    monkeypatch.setattr(engine, "CONTEXT", 3200)
    for run in (engine._load(model, 0.5), engine._scheduler_step(40)):
        run()
        run()


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="tpu"):
        engine.run("tpu")
