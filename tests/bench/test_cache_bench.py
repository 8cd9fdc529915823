"""Rows of `bench cache` on short traces: what they hold and how they relate. No time is asserted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from perilune.bench import cache as bench
from perilune.bench.cache_details import MOMENTS, write_details
from perilune.bench.cache_traces import TRACES
from perilune.bench.harness import read
from perilune.cli.main import main
from perilune.config.presets import k3
from perilune.errors import ConfigError
from perilune.report.serving import hits, page_map
from perilune.serve.cache import HybridCache, Retention, RootKey, TokenChain, cache_geometry
from perilune.serve.cache.geometry import CacheGeometry


def small() -> CacheGeometry:
    """Units of 16 tokens, so that short traces have many of them."""
    return CacheGeometry(unit=16, page_tokens=32, attention_layers=24, recurrent_layers=69, token_bytes=1152,
                         state_bytes=30_000, heads=12)  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_conversations(name):
    turns = TRACES[name](np.random.default_rng(0), 0.02)
    assert len(turns) >= 200 and turns[0].prompt.dtype == np.uint32
    for index, turn in enumerate(turns):
        assert -1 <= turn.after < index and turn.delay >= 0 and len(turn.reply) >= 1
        assert list(turn.message_ends) == sorted(set(turn.message_ends)) and turn.message_ends[-1] == len(turn.prompt)
        if turn.after >= 0 and name == "agent":
            earlier = np.concatenate([turns[turn.after].prompt, turns[turn.after].reply])
            assert np.array_equal(turn.prompt[: len(earlier)], earlier), "the next turn goes on with the reply"
    again = TRACES[name](np.random.default_rng(0), 0.02)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(turns, again))


@pytest.mark.parametrize("name", TRACES)
def test_every_request_is_served_and_counted(name):
    turns = TRACES[name](np.random.default_rng(0), 0.02)
    cache = HybridCache(small(), 400, Retention.parse("dense"))
    found = bench.Engine(cache, turns).run()
    counters = cache.metrics().counters
    assert counters.requests == len(turns) + found.preempted and cache.metrics().requests == 0
    assert counters.tokens_hit <= found.ideal_tokens < counters.prompt_tokens
    assert len(found.admit_ms) == counters.requests + counters.refused
    cache.check_invariants()


def test_endless_memory_and_dense_checkpoints_are_ideal():
    turns = TRACES["agent"](np.random.default_rng(0), 0.02)
    cache = HybridCache(small(), 20_000, Retention.parse("dense"))
    found = bench.Engine(cache, turns).run()
    assert cache.metrics().counters.tokens_hit == found.ideal_tokens > 0


def test_a_pool_without_room_preempts_and_still_serves_all():
    rng = np.random.default_rng(0)
    turns = [
        bench.Turn(rng.integers(0, 9, 64, np.uint32), rng.integers(0, 9, 96, np.uint32), (64,), -1, 0) for _ in range(8)
    ]
    cache = HybridCache(small(), 40, Retention.parse("tail"))
    found = bench.Engine(cache, turns).run()
    assert found.preempted > 0 and cache.metrics().counters.requests == 8 + found.preempted


def test_rows(tmp_path):
    results, seen = tmp_path / "rows.jsonl", []
    options = {"results": results, "scale": 0.02, "pools": (60,)}
    assert bench.run("cpu", 0.0, ["tail"], **options) == []
    rows = bench.run("cpu", None, ["tail", "turns+second-hit"], on_row=lambda row: seen.append(row.name), **options)
    assert [row.name for row in rows] == seen
    assert seen[:2] == ["cache_agent_tail_60", "cache_agent_turns+second-hit_60"] and len(seen) == 6 + 7
    for row in rows[:6]:
        extra = row.extra
        assert 0 <= extra["saved_share"] <= extra["ideal_share"] < 1 and extra["pages_peak"] <= 60
        assert extra["saved_gb"] == pytest.approx(extra["saved_tokens"] * 27648 / 1e9)
        assert row.ours_ms <= extra["step_p99_ms"] <= row.ours_spread_ms[1]
    assert bench.run("cpu", 0.0, ["tail", "turns+second-hit"], **options) == rows == read(results)


def test_parts_do_what_their_names_say():
    cases = {case.name: case for case in bench.part_cases(cache_geometry(k3()), 20_000)}
    run = {name: case.make()[0] for name, case in cases.items()}
    assert run["cache_match_kept"]().resume == 39 * 512
    chains = [run["cache_hash"](), run["cache_hash_list"]()]
    assert chains[0].digests == chains[1].digests and len(chains[0].digests) == 39
    assert run["cache_explain"]().resume == 39 * 512
    for name in ("cache_admit_release", "cache_sampled_check", "cache_decode_step"):
        run[name]()
        run[name]()


def test_policies_by_name():
    assert bench.chosen(["all"]) == bench.POLICIES
    assert (
        bench.chosen(["second-hit+turns", "all"])[0] == "turns+second-hit" and len(bench.chosen(["tail", "all"])) == 6
    )
    with pytest.raises(ConfigError, match="retention 'none' is not known"):
        bench.chosen(["none"])
    with pytest.raises(ConfigError, match="runs on the host"):
        bench.run("cuda")
    with pytest.raises(ConfigError, match="does not fit into the pool"):
        turn = bench.Turn(np.arange(64, dtype=np.uint32), np.arange(3, dtype=np.uint32), (64,), -1, 0)
        cache = HybridCache(small(), 8, Retention.parse("tail"))
        cache.admit("other", TokenChain(RootKey(model="x"), 16, range(64)))
        bench.Engine(cache, [turn]).run()


def test_the_verb(tmp_path, monkeypatch, capsys):
    real = bench.run
    monkeypatch.setattr(bench, "run", lambda *args, **options: real(*args, **options, scale=0.02, pools=(60,)))
    results = tmp_path / "rows.jsonl"
    assert main(["bench", "cache", "--policies", "tail", "--json", "--results", str(results)]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)["rows"]) == 3 + 7 == len(read(results))
    assert "cache_agent_tail_60" in told.err and "prompt tokens" in told.err


def test_a_watched_replay_makes_a_page_map_and_a_timeline(tmp_path):
    files = write_details(tmp_path, scale=0.05, pages=200)
    assert [file.stem for file in files] == [f"cache-{name}" for name in TRACES]
    for file in files:
        value = json.loads(file.read_text())
        (outcome,) = value["outcomes"].values()
        assert len(outcome["events"]) >= 200 and MOMENTS // 2 <= len(outcome["pages"]) < 2 * MOMENTS
        assert all(event["hit_tokens"] <= event["kv_tokens"] < event["prompt_tokens"] for event in outcome["events"])
        drawn, curves = page_map(value["scenario"], value["outcomes"]), hits(value["scenario"], value["outcomes"])
        assert drawn.x_label == curves.x_label == "steps" and set(np.unique(drawn.frames[0][1])) >= {0.0, 1.0, 3.0}
