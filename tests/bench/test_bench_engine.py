"""The engine's rows do what they say, on a model small enough to run them."""

from __future__ import annotations

import pytest

from perilune.bench import engine, engine_loads, engine_waits
from perilune.bench.engine_driver import model_of
from perilune.bench.engine_tiers import TierHit
from perilune.bench.harness import Case
from perilune.errors import ConfigError


@pytest.fixture(scope="module")
def model():
    return model_of("tiny", "cpu")


def test_decoding_moves_every_sequence(model):
    step, bare = engine_loads.decode(model, 3, 24)
    for run in (step, step, bare):
        run()


@pytest.mark.parametrize("beside", ["state", "alone", "pass"])
def test_first_tokens(model, beside):
    ours, theirs = engine_loads.first_token(model, 40, 20, beside)
    for run in (ours, theirs, ours, theirs):  # more than once: what a call leaves behind must not fill the pool
        run()


@pytest.mark.parametrize("stops", [False, True])
def test_loads(model, stops):
    for run in (engine_loads.load(model, stops=stops, answers=6), engine_loads.together(model, one_pass=stops)):
        run()
        run()


def test_scheduling(model):
    engine_loads.scheduler_step(40)()


@pytest.mark.parametrize("disk", [False, True])
def test_hits_come_back_from_tiers(model, disk):
    """That they are hits is asserted by the row itself."""
    row = TierHit(model=model, prefix=700, suffix=20, disk=disk, goal=0.5, name="n", shape="s").measure("cpu", 1)
    assert row.samples == 7 and row.extra["brought_back_ms"] > 0 and row.extra["target_ratio"] == 0.5


def test_waits_are_those_of_all_short_prompts(model, monkeypatch):
    monkeypatch.setattr(engine_waits, "ROUNDS", 1)
    monkeypatch.setattr(engine_waits, "EACH", 5)
    monkeypatch.setattr(engine_waits, "LONG", 300)
    row = engine_waits.Waits(model=model, context=256, goal=0.5).measure("cpu", 1)
    assert row.samples == 5 and row.ours_ms == row.extra["budgets_p99_ms"] and row.peer_ms == row.extra["idle_p99_ms"]


def test_rows_say_what_they_aim_at():
    case = engine.Aimed(case=Case(name="n", shape="s", make=lambda: (int, int)), target_ratio=0.5)
    assert case.measure("cpu", 3).extra == {"target_ratio": 0.5}


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="tpu"):
        engine.run("tpu")
