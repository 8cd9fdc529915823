"""The engine's rows do what they say, on a model small enough to run them."""

from __future__ import annotations

import pytest

from perilune.bench import engine, engine_driver, engine_loads, engine_prefix, engine_waits
from perilune.bench.engine_driver import model_of
from perilune.bench.harness import Case
from perilune.errors import ConfigError
from perilune.serve.schedule import Limits


@pytest.fixture(scope="module")
def model():
    return model_of("tiny", "cpu")


def test_decoding_moves_every_sequence(model):
    step, bare = engine_loads.decode(model, 3, 24)
    for run in (step, step, bare):
        run()


@pytest.mark.parametrize("stops", [False, True])
def test_loads(model, stops):
    for run in (engine_loads.load(model, stops=stops, answers=6), engine_loads.together(model, one_pass=stops)):
        run()
        run()


def test_scheduling(model):
    engine_loads.scheduler_step(40)()


def test_an_engine_that_runs_ahead_says_the_same(model, monkeypatch):
    said = []
    for ahead in (True, False):
        monkeypatch.setattr(engine_driver, "pays_off", lambda device, ahead=ahead: ahead)
        limits = Limits(sequences=3, classes=engine_driver.ONE_CLASS)
        driver = engine_driver.Driver(model, engine_driver.pages_of(model, 400, 3), limits, ahead=True)
        sequences = [driver.add(engine_driver.random_ids(model, length, length)) for length in (20, 31, 44)]
        while any(sequence.drawn < 12 for sequence in sequences):
            driver.step()
        said.append([sequence.ids[sequence.prompt :][:12] for sequence in sequences])
    assert said[0] == said[1]


def test_first_tokens_behind_a_prefix(monkeypatch):
    """That they are hits is asserted by the rows themselves."""
    monkeypatch.setattr(engine_prefix, "SECONDS", 0.0)
    sizes = engine_prefix.Sizes(prefix=700, suffix=20, chunk=100, peer_chunk=700, cold=2)
    rows = {case.name: case.measure("cpu", 1) for case in engine_prefix.rows("tiny", "cpu", sizes)}
    assert list(rows) == [f"engine_ttft_{kind}" for kind in ("cold", "hit", "alone", "host", "disk")]
    assert rows["engine_ttft_cold"].samples == 2 and rows["engine_ttft_cold"].bound_ms > 0
    assert all(row.samples == engine_prefix.LEAST for name, row in rows.items() if name != "engine_ttft_cold")
    for kind in ("hit", "host", "disk"):
        assert rows[f"engine_ttft_{kind}"].extra["score_difference"] < 1e-4
    for kind in ("host", "disk"):
        assert rows[f"engine_ttft_{kind}"].extra["brought_back_ms"] > 0
    assert rows["engine_ttft_host"].extra["target_ratio"] == 1 / 1.5


def test_waits_are_those_of_all_short_prompts(model, monkeypatch):
    monkeypatch.setattr(engine_waits, "EACH", 5)
    sizes = engine_waits.Sizes(long=300, step_tokens=512, context=256, rounds=1, gap=8.0)
    row = engine_waits.Waits(model=model, sizes=sizes, goal=0.5).measure("cpu", 1)
    assert row.samples == 5 and row.ours_ms == row.extra["budgets_p99_ms"] and row.peer_ms == row.extra["idle_p99_ms"]
    assert row.extra["long_price"] > 0


def test_rows_say_what_they_aim_at():
    case = engine.Aimed(case=Case(name="n", shape="s", make=lambda: (int, int)), target_ratio=0.5)
    assert case.measure("cpu", 3).extra == {"target_ratio": 0.5}


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="tpu"):
        engine.run("tpu")
