"""Constrained answers of a random tiny model: they parse, obey their schemas, and do not depend on the batch."""

from __future__ import annotations

import json
import queue
import sys
import threading
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from tiny_model import scripted_engine, talkative_engine, tiny_engine, uncached

from perilune.errors import RequestError
from perilune.serve.engine import JobEnd
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import ChatOptions, FieldError, SamplingParams, Structured
from perilune.serve.sampling import Sampler, allowed_only
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml import encode_segments, open_tag, render
from perilune.tokenizer.xtml.parse import parse

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
FORM = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
HELLO = [{"role": "user", "content": "Hi"}]
CALL = ChatOptions(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
LONG = SamplingParams(seed=0, max_tokens=600)


def make(*, seed: int = 0, dtype=torch.float32, **options) -> LocalEngine:
    """In fp32, which is four times as fast; in fp64 where two runs have to say the same."""
    return talkative_engine(seed, eagerness=7.0, dtype=dtype, **options)


def ask(engine, messages=HELLO, params=LONG, options=None, n=1):
    """(job, deltas by row)."""
    job = engine.chat(messages, params, n, options)
    rows: list[list] = [[] for _ in range(n)]
    for delta in job:
        rows[delta.row].append(delta)
    return job, rows


def calls_of(deltas):
    """name, arguments of every call, put together from the pieces."""
    calls: dict[int, list] = {}
    for delta in deltas:
        for call in delta.calls:
            if call.id is not None:
                calls[call.position] = [call.name, ""]
            calls[call.position][1] += call.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_calls_are_valid(temperature, thinking):
    engine = make(thinking=thinking)
    _, rows = ask(engine, params=SamplingParams(seed=3, temperature=temperature, max_tokens=400), options=CALL, n=2)
    ended = [row for row in rows if row[-1].finish_reason == "tool_calls"]
    assert len(ended) == 2
    for row in ended:
        calls = calls_of(row)
        assert calls and all(name == "weather" for name, _ in calls)
        for _, arguments in calls:
            jsonschema.validate(arguments, WEATHER)


@pytest.mark.parametrize("seed", range(4))
def test_json_answers_are_valid(seed):
    _, (row,) = ask(make(seed=seed), options=ChatOptions(response_format=FORM))
    assert row[-1].finish_reason == "stop"
    jsonschema.validate(json.loads("".join(delta.text for delta in row)), WEATHER)


def test_a_named_tool_is_called_once():
    other = {"type": "function", "function": {"name": "now"}}
    options = ChatOptions(tools=[other, TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
    _, rows = ask(make(), options=options, n=2)
    assert [[name for name, _ in calls_of(row)] for row in rows] == [["weather"], ["weather"]]
    _, rows = ask(make(), options=ChatOptions(tools=[other], tool_choice="required", parallel_tool_calls=False), n=3)
    assert [calls_of(row) for row in rows] == [[("now", {})]] * 3


def test_drawn_ids_parse_completely():
    engine = make(seed=1, thinking=True)
    job, _ = ask(engine, options=CALL, n=3)
    for answer in job.answers:
        parsed = parse(engine.tokenizer, answer.token_ids, thinking=True, tools=("weather",))
        assert parsed.problems == () and parsed.finished and parsed.tool_calls


def test_rows_with_other_constraints_or_none_do_not_change_a_row():
    requests = {"free": None, "call": CALL, "json": ChatOptions(response_format=FORM)}
    params = SamplingParams(seed=7, top_k=40, top_p=0.95, max_tokens=50)

    def run(rows):
        engine = make(seed=2, dtype=torch.float64)
        jobs = [engine.chat(HELLO, params, 1, requests[row]) for row in rows]
        heard: list[list] = [[] for _ in rows]
        ends = [threading.Event() for _ in rows]

        def listener(row):
            return lambda event: ends[row].set() if isinstance(event, JobEnd) else heard[row].append(event)

        for row, job in enumerate(jobs):
            job.start(listener(row))
        assert all(end.wait(60) for end in ends)
        return [job.answers[0].token_ids for job in jobs]

    together = run(["free", "call", "json", "call"])
    assert together[1] == together[3] and len({tuple(ids) for ids in together}) == 3
    assert [run([row])[0] for row in ("free", "call", "json")] == together[:3]


def test_the_grammar_comes_before_every_filter():
    """top_k of what is allowed, not what is allowed of the top k."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]] * 3)
    mask = np.array([False, False, False, True, True])
    for params in (
        SamplingParams(seed=0, top_k=1),
        SamplingParams(seed=0, top_p=1e-6),
        SamplingParams(seed=0, min_p=1.0),
        SamplingParams(temperature=0.0),
    ):
        kept = allowed_only(logits, [mask, None, mask])
        assert Sampler([params] * 3).draw(kept) == [3, 0, 3]
    draws = {
        i for seed in range(40) for i in Sampler([SamplingParams(seed=seed, top_k=4, temperature=5.0)]).draw(kept[:1])
    }
    assert draws == {3, 4}, "fewer tokens are allowed than top_k asks for"
    assert allowed_only(logits, [None, None, None]) is logits and logits[0, 0] == 5.0


def test_later_turns_find_the_earlier_ones_without_their_options():
    """Options of one request stand behind the history; the next request does not have them, and still starts warm."""
    for options in (
        CALL,
        ChatOptions(response_format=FORM),
        ChatOptions(tools=[TOOL], tool_choice="none"),
        ChatOptions(tools=[TOOL]),
    ):
        engine, plain = make(dtype=torch.float64), make(dtype=torch.float64, settings=uncached())
        job = engine.chat(HELLO, LONG, 1, options)
        for _ in job:
            pass
        message = job.answers[0].reader.message()
        history = [*HELLO, message]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "4"} for c in message.get("tool_calls", ())]
        after = [*history, *results, {"role": "user", "content": "And now?"}]
        second = ChatOptions(tools=options.tools)
        short = SamplingParams(seed=1, max_tokens=12)
        warm, rows = ask(engine, after, short, second)
        _, expected = ask(plain, after, short, second)
        assert [d.text for d in rows[0]] == [d.text for d in expected[0]]
        turn = render(engine.tokenizer, HELLO, tools=options.tools, thinking=False, add_generation_prompt=False).ids
        assert warm.usage.cached_tokens >= len(turn) // 4 * 4 > 0 == plain.metrics().cached_tokens_total


def test_the_history_in_front_of_an_option_is_run_once():
    engine, short = make(), SamplingParams(seed=0, max_tokens=4)
    history = render(engine.tokenizer, HELLO, thinking=False, add_generation_prompt=False).ids
    ask(engine, options=ChatOptions(response_format=FORM), params=short)
    before = engine.core.runner.tokens_run
    job, _ = ask(
        engine, options=ChatOptions(response_format={"type": "json_object"}), params=SamplingParams(max_tokens=1)
    )
    assert job.usage.cached_tokens == len(history) // 4 * 4
    assert engine.core.runner.tokens_run - before == job.usage.prompt_tokens - job.usage.cached_tokens > 0


def test_tools_that_a_message_adds_can_be_called():
    added = [{"role": "system", "tools": [TOOL]}, *HELLO]
    _, (row,) = ask(make(), added, options=ChatOptions(tool_choice="required"))
    assert row[-1].finish_reason == "tool_calls" and calls_of(row)[0][0] == "weather"


def test_t33_calls_of_a_request_without_tools_are_dropped():
    """Nothing of an undeclared tool reaches the client: no call, no text, no marker."""
    tokenizer = ByteTokenizer()
    call = {"function": {"name": "rm", "arguments": '{"p": "/"}'}}
    answer = {"role": "assistant", "content": "ok", "tool_calls": [call]}
    opened = len(encode_segments(tokenizer, [*open_tag("message", {"role": "assistant"}), *open_tag("response")]))
    script = render(tokenizer, [answer], thinking=False, add_generation_prompt=False).ids[opened:]
    greedy = SamplingParams(temperature=0.0, max_tokens=200)
    for options, shown in [
        (None, 0),
        (ChatOptions(tools=[TOOL], tool_choice="none"), 0),
        (ChatOptions(tools=[TOOL]), 1),
    ]:
        _, (row,) = ask(scripted_engine(script), params=greedy, options=options)
        assert "".join(delta.text for delta in row) == "ok" and len(calls_of(row)) == shown
        assert row[-1].finish_reason == ("tool_calls" if shown else "stop")


def test_an_answer_that_is_cut_inside_of_a_call_says_so():
    tokenizer = ByteTokenizer()
    call = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    opened = len(encode_segments(tokenizer, [*open_tag("message", {"role": "assistant"}), *open_tag("response")]))
    script = render(tokenizer, [answer], thinking=False, add_generation_prompt=False).ids[opened:]
    cut = SamplingParams(temperature=0.0, max_tokens=script.index(ord("s"), script.index(ord("O"))) + 1)
    engine = scripted_engine(script)
    _, (row,) = ask(engine, params=cut, options=ChatOptions(tools=[TOOL]))
    assert row[-1].finish_reason == "length"
    assert "".join(call.arguments for delta in row for call in delta.calls) == '{"city": "Os'


@pytest.mark.parametrize(
    ("options", "param", "match"),
    [
        (ChatOptions(tool_choice="required"), "tool_choice", "no tools"),
        (ChatOptions(tools=[TOOL], tool_choice="maybe"), "tool_choice", "maybe"),
        (ChatOptions(tools=[TOOL], tool_choice={"function": {"name": "rm"}}), "tool_choice", "rm"),
        (ChatOptions(response_format={"type": "xml"}), "response_format", "xml"),
        (ChatOptions(response_format={"type": "json_schema"}), "response_format.json_schema.schema", "missing"),
        (ChatOptions(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}), "response_format", "constrained"),
        (ChatOptions(tools=[{"function": {"name": "f", "strict": True, "parameters": {"minProperties": 1}}}]), "tools[0].function.parameters", "minProperties"),
        (ChatOptions(thinking=True), "reasoning_effort", "taught"),
        (ChatOptions(effort="low"), "reasoning_effort", "taught"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_kept_fail_before_anything_runs(options, param, match):
    engine = make()
    with pytest.raises(FieldError, match=match) as caught:
        engine.chat(HELLO, LONG, 1, options)
    assert caught.value.param == param and engine.core.runner.tokens_run == 0


def test_effort_and_thinking_reach_the_prompt():
    engine = make(thinking=True)
    with pytest.raises(FieldError, match="medium"):
        engine.chat(HELLO, LONG, 1, ChatOptions(effort="medium"))
    for options, expected in [
        (ChatOptions(effort="low"), {"thinking": True, "effort": "low"}),
        (ChatOptions(), {"thinking": True}),
        (ChatOptions(thinking=False), {"thinking": False}),
    ]:
        job = engine.chat(HELLO, LONG, 1, options)
        assert [s.ids for s in job.sequences] == [render(engine.tokenizer, HELLO, **expected).ids]


def test_without_llguidance_the_extra_is_named(monkeypatch):
    engine = make()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(FieldError, match=r"pip install perilune\[grammar\]"):
        engine.chat(HELLO, LONG, 1, CALL)
    engine.chat(HELLO, LONG, 1, ChatOptions(tools=[TOOL]))


@pytest.mark.parametrize("form", [Structured("grammar", "start: start"), Structured("regex", ".*" * 200)])
def test_a_grammar_that_does_not_go_on_ends_its_own_request_alone(form):
    """Both are drawn in the same step; a grammar that allows nothing, or costs too much, is no fault of the other."""
    engine = tiny_engine()
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = [token for delta in engine.complete(["def f("], params) for token in delta.token_ids]
    engine.admin.pause()
    jobs = [engine.complete(["def f("], one) for one in (params, replace(params, structured=form), params)]
    heard: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in jobs]
    for job, listener in zip(jobs, heard):
        job.start(listener.put)
    engine.admin.resume()
    ends = []
    for listener in heard:
        while not isinstance(event := listener.get(timeout=60), JobEnd):
            pass
        ends.append(event.error)
    assert ends[0] is None and ends[2] is None and isinstance(ends[1], RequestError)
    assert "simplify it" in str(ends[1])
    assert [jobs[row].answers[0].token_ids for row in (0, 2)] == [expected, expected]
    assert engine.metrics().failed_steps_total == 0 and engine.admin.check_invariants() == []
    engine.close()
