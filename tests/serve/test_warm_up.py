"""Warming up: what it runs, who hears of what was missed, and what a server says meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fake_engine import FakeEngine
from tiny_model import tiny_engine, uncached

from perilune.errors import ConfigError
from perilune.ops import first_use
from perilune.serve import structured, warm_up
from perilune.serve.engine import EngineClosed
from perilune.serve.llm import LLM
from perilune.serve.request import SamplingParams
from perilune.serve.runner.preparations import preparations
from perilune.serve.settings import EngineSettings
from perilune.serve.warm_up import FirstUses

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def test_it_changes_nothing_and_tells_how_far_it_is():
    cold, warm, seen = tiny_engine(), tiny_engine(), []
    warm.warm_up(lambda done, of, what: seen.append((done, of, what)))
    assert [done for done, *_ in seen] == list(range(len(seen))) and seen[-1][1:] == (len(seen) - 1, "done")
    for one in (cold, warm):
        assert one.metrics().model_tokens_total == 0 and one.admin.check_invariants() == []
    answers = []
    for one in (cold, warm):
        job = one.complete(["def main("], GREEDY)
        list(job)
        answers.append(job.answers[0].token_ids)
        one.close()
    assert answers[0] == answers[1]


def test_requests_are_answered_between_its_pieces(monkeypatch):
    engine, began = tiny_engine(), threading.Event()
    job = engine.complete([[5, 6, 7]], GREEDY)
    made = preparations(engine.core.runner)

    def slow():
        began.set()
        list_of.append(1)

    list_of: list[int] = []
    monkeypatch.setattr(warm_up, "preparations", lambda runner, rare: [("slow", slow)] * 50 + made)
    thread = threading.Thread(target=engine.warm_up)
    thread.start()
    began.wait(10)
    assert sum(len(delta.token_ids) for delta in job) == 6
    thread.join(10)
    assert len(list_of) == 50
    engine.close()


def test_an_engine_that_closes_ends_it(monkeypatch):
    engine = tiny_engine()
    monkeypatch.setattr(warm_up, "preparations", lambda runner, rare: [("close", lambda: engine.close(0.0))] * 2)
    with pytest.raises(EngineClosed):
        engine.warm_up()


def test_lazy_does_nothing(monkeypatch):
    engine = tiny_engine(settings=uncached(warm_up="lazy"))
    monkeypatch.setattr(warm_up, "preparations", lambda runner, rare: pytest.fail("nothing was asked for"))
    assert engine.warm_up() == 0.0 and not engine.first_uses.warmed
    engine.close()
    with pytest.raises(ConfigError, match="allowed: full, fast, lazy"):
        EngineSettings(warm_up="some")
    with pytest.raises(ConfigError, match="allowed: auto, decode, off"):
        EngineSettings(cuda_graphs="on")


def test_fast_leaves_out_what_is_rare(monkeypatch):
    asked = []
    for way in ("full", "fast"):
        engine = tiny_engine(settings=uncached(warm_up=way))
        monkeypatch.setattr(
            warm_up, "preparations", lambda runner, rare: asked.append(rare) or preparations(runner, rare=rare)
        )
        engine.warm_up()
        assert engine.first_uses.warmed
        engine.core.runner.prefill_graphs = SimpleNamespace(rooms=[])  # as on a GPU: prompts run by recordings
        names = [what for what, _ in preparations(engine.core.runner, rare=way == "full")]
        assert any("tokens as they are" in name for name in names) == (way == "full")
        assert ("prompts together as they are" in names) == (way == "full")
        engine.close()
    assert asked == [True, False]


def test_what_was_missed_is_counted_and_logged(caplog):
    """Behind the warm-up alone; an engine that is gone hears nothing."""
    engine = tiny_engine()
    with caplog.at_level(logging.WARNING, "perilune.serve.warm_up"):
        first_use.tell("compiled early", 0.5)
        engine.warm_up()
        assert engine.metrics().compilations_total == 0
        caplog.clear()
        first_use.tell("compiled late", 0.25)
    assert set(caplog.messages) == {
        "compiled late while requests may be waiting: 250 ms"
    }  # of every engine that is warm
    now = engine.metrics()
    assert (now.compilations_total, now.compilation_seconds_total) == (1, 0.25)
    engine.close()
    uses = FirstUses()
    first_use.listen(uses)
    first_use.tell("one", 1.0)
    assert uses.count == 1
    del uses
    first_use.tell("two", 1.0)


class ColdEngine(FakeEngine):
    """Warms up until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def warm_up(self) -> None:
        self.go.wait(20)
        self.warm_up_ended()

    def warm_up_ended(self) -> None:
        pass


class BrokenEngine(ColdEngine):
    """Fails at it."""

    def warm_up_ended(self) -> None:
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize("kind", [ColdEngine, BrokenEngine])
def test_a_server_is_alive_but_not_ready_meanwhile(kind, monkeypatch, caplog):
    import httpx

    from perilune.serve.api import context
    from perilune.serve.api.server import serve_in_thread

    monkeypatch.setattr(context, "SHORT_WARM_UP", 0.0)
    engine = kind()
    with serve_in_thread(engine) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        answer = httpx.get(server.url + "/ready")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "warming_up"
        engine.go.set()
        until = time.monotonic() + 10
        while httpx.get(server.url + "/ready").status_code != 200:
            assert time.monotonic() < until
    assert ("the warm-up failed" in caplog.text) == (kind is BrokenEngine)


def test_the_device_is_not_asked_on_a_cpu():
    engine = tiny_engine()
    assert not engine.core.runner.launches and not torch.cuda.is_initialized()
    engine.warm_up()
    assert not torch.cuda.is_initialized()
    engine.close()


def test_offline_by_option(monkeypatch):
    engine, asked = tiny_engine(), []
    monkeypatch.setattr(engine, "warm_up", lambda: asked.append(1))
    LLM(engine)
    assert not asked
    LLM(engine, warm_up=True)
    assert asked == [1]
    engine.close()


def test_a_grammar_is_read_before_the_first_request_needs_one(monkeypatch):
    """The table of all tokens' bytes that grammars share."""
    from perilune.tokenizer.xtml import grammar_mask

    pytest.importorskip("llguidance")
    grammar_mask._ll_tokenizer.cache_clear()
    structured._text_mask.cache_clear()
    engine = tiny_engine()
    engine.warm_up()
    assert grammar_mask._ll_tokenizer.cache_info().currsize == 1
    engine.close()
