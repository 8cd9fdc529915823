"""The load generator: traces say what they promise, times count from when a request was due, and pictures come of it."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from perilune.bench import serve as bench
from perilune.bench.serve_load import Load, Record, _events, kind_of
from perilune.bench.serve_traces import TRACES, make_trace
from perilune.config.presets import preset
from perilune.errors import CapacityError, ConfigError
from perilune.model import Transformer, init_weights
from perilune.report.serving import draw
from perilune.serve.api import serve_in_thread
from perilune.serve.local_engine import LocalEngine
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_decided_by_their_seed_and_fit_the_context(name):
    sizes = {"seed": 3, "context": 8192, "vocabulary": 256}
    asks = make_trace(name, 40, 4.0, **sizes)
    assert asks == make_trace(name, 40, 4.0, **sizes) != make_trace(name, 40, 4.0, **(sizes | {"seed": 4}))
    assert all(ask.reply >= 2 and max(ask.new) < 256 and ask.after < index for index, ask in enumerate(asks))
    longest = [0] * len(asks)
    for index, ask in enumerate(asks):
        longest[index] = len(ask.new) + ask.reply + (longest[ask.after] if ask.after >= 0 else 0)
    assert sum(length <= 8192 for length in longest) > 0.8 * len(asks)


def test_the_shared_traces_share_and_the_burst_bursts():
    sizes = {"seed": 0, "context": 8192, "vocabulary": 256}
    agents = [ask for ask in make_trace("agent", 64, 4.0, **sizes) if ask.after < 0]
    assert len({ask.new[:1000] for ask in agents}) == 1 and len(agents) > 1
    assert len({ask.new[:500] for ask in make_trace("shared", 50, 4.0, **sizes)}) == 3
    burst = make_trace("burst", 30, 4.0, **sizes)
    long = [ask for ask in burst if kind_of(len(ask.new), 8192) == "long"]
    assert len(long) == 9 and len({ask.at for ask in long}) == 3
    left = make_trace("chat", 400, 4.0, abort=0.25, **sizes)
    assert 0.15 < sum(ask.cut < 1 for ask in left) / 400 < 0.35


def test_numbers_that_make_no_sense_are_refused():
    sizes = {"seed": 0, "context": 8192, "vocabulary": 256}
    with pytest.raises(ConfigError, match="chat, agent"):
        make_trace("nothing", 4, 1.0, **sizes)
    with pytest.raises(ConfigError, match="rate"):
        make_trace("chat", 4, 0.0, **sizes)
    with pytest.raises(CapacityError, match="no server"):
        asyncio.run(Load([], "http://127.0.0.1:9", model="", context=512).run())


def test_a_record_counts_from_when_its_request_was_due():
    record = Record(0, "short", 1.0, tokens=[(1.5, 1), (1.7, 2), (2.1, 1)])
    assert record.first == pytest.approx(0.5) and record.each == pytest.approx(0.6 / 3) and record.drawn == 4
    assert Record(0, "short", 1.0).first is None and Record(0, "short", 1.0, tokens=[(2.0, 1)]).each is None


@pytest.fixture(scope="module")
def server():
    model = init_weights(Transformer(preset("tiny")), 0)
    settings = EngineSettings(unit=16, cache_bytes=2**23)
    engine = LocalEngine(model, ByteTokenizer(), name="tiny", context_length=1024, settings=settings)
    with serve_in_thread(engine, admin_port=0) as handle:
        yield handle
    engine.close()


@pytest.mark.parametrize(("trace", "concurrency"), [("agent", 0), ("agent", 3)])
def test_a_run_measures_hits_and_draws_pictures(server, tmp_path, trace, concurrency):
    load = bench.LoadPlan(requests=8, rate=40.0, concurrency=concurrency)
    outcome = asyncio.run(bench.drive(server.url, trace, load, admin_url=server.admin_url))
    assert [one.status for one in outcome.records] == [200] * 8
    assert len(outcome.events) == 8, "the request that warms the server up is not one of the trace's"
    asks = make_trace(trace, 8, 40.0, seed=0, context=1024, vocabulary=256)
    assert [one.drawn for one in outcome.records] == [ask.reply for ask in asks]
    assert outcome.hit_ratio > 0.3, "a turn's prompt begins with the turn before"
    assert outcome.pages and outcome.events
    rows = bench.rows_of(trace, "8 requests", "cpu", {"with": outcome, "without": outcome})
    metrics = {row.name.split("_")[2] for row in rows}
    assert metrics == {"ttft", "tpot", "token"} and all(row.ratio == 1.0 for row in rows)
    assert rows[-1].extra["hit_ratio"] == outcome.hit_ratio and rows[-1].extra["refused"] == 0
    if concurrency:
        return  # the pictures are the same
    bench.write_details(tmp_path / f"serve-{trace}.json", trace, "8 requests", {"with": outcome})
    pytest.importorskip("matplotlib", reason="the extra report is not installed")
    names = {path.name for path in draw(tmp_path)}
    assert names == {f"serve-{trace}-{part}.png" for part in ("first", "each", "hits", "pages")}


def test_the_worst_waits_of_a_burst_stand_beside_an_idle_server():
    def outcome(first: float) -> bench.Outcome:
        records = [Record(n, "short", 0.0, tokens=[(first * (n + 1), 1)], status=200) for n in range(101)]
        return bench.Outcome(records, seconds=1.0)

    rows = bench.rows_of("burst", "s", "cpu", {"budgets": outcome(0.02), "queue": outcome(0.5), "idle": outcome(0.01)})
    row = next(row for row in rows if row.name == "serve_burst_p99_short")
    assert row.ours_ms == pytest.approx(2000.0) and row.peer_ms == pytest.approx(1000.0)
    assert row.ratio == pytest.approx(0.5) == row.extra["target_ratio"]
    assert row.extra["one_queue_p99_ms"] == pytest.approx(50_000.0)


def test_clients_that_leave_are_counted_and_leave_nothing_behind(server):
    outcome = asyncio.run(bench.drive(server.url, "chat", bench.LoadPlan(requests=12, rate=60.0), abort=1.0))
    gone = [one for one in outcome.records if one.status == 499]
    assert gone and all(one.drawn < 64 for one in gone) and not outcome.of("all")
    for _ in range(500):  # the server sees a closed connection a moment later
        if len(server.context.exchanges) == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"{len(server.context.exchanges)} requests of clients that have gone are still answered")


def test_a_scenario_of_a_running_server_has_no_peer(server, tmp_path):
    results = tmp_path / "rows.jsonl"
    load = bench.LoadPlan(requests=4, rate=40.0)
    rows = bench.run("cpu", None, ["shared"], load, bench.ServerPlan(), url=server.url, results=results)
    assert rows and all(row.peer == "" and row.ratio is None for row in rows)
    assert [json.loads(line)["name"] for line in results.read_text().splitlines()] == [row.name for row in rows]
    with pytest.raises(ConfigError, match="scenario"):
        bench.run("cpu", None, ["wrong"], load, bench.ServerPlan(), url=server.url, results=results)


def test_a_text_may_hold_what_python_takes_for_line_ends():
    """An event ends at a line feed, wherever the network cuts it."""
    body = 'data: {"text": "a\u2028b\x85cd"}\r\n\r\n: beat\n\ndata: {"more": 1}\n\ndata: [DONE]\n\n'.encode()

    class Response:
        async def aiter_bytes(self):
            for first in range(0, len(body), 7):
                yield body[first : first + 7]

    async def read():
        return [value async for value in _events(Response())]

    assert asyncio.run(read()) == [{"text": "a\u2028b\x85cd"}, {"more": 1}]
