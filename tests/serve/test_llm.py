"""Offline generation over the engine: many prompts at once give what each gives alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_model import talkative_engine, tiny_engine

from perilune.errors import ConfigError, RequestError
from perilune.serve.engine import JobEnd
from perilune.serve.job import LocalJob
from perilune.serve.llm import LLM
from perilune.serve.request import ChatOptions, FieldError, SamplingParams, Service

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_engine(dtype=torch.float64))


def test_many_prompts_give_what_each_gives_alone(llm):
    prompts = ["def f(", "a", list(b"import os"), "x = 1\n"]
    params = [
        GREEDY,
        SamplingParams(seed=3, temperature=2.0, max_tokens=5),
        GREEDY,
        SamplingParams(seed=4, max_tokens=9),
    ]
    together = llm.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, together):
        (alone,) = LLM(tiny_engine()).generate(prompt, one)
        assert alone.outputs == result.outputs and len(result.outputs[0].token_ids) == one.max_tokens
    assert [result.usage.prompt_tokens for result in together] == [6, 1, 9, 6]


def test_n_answers_and_their_logprobs(llm):
    (result,) = llm.generate("abc", SamplingParams(seed=0, temperature=3.0, max_tokens=4, logprobs=1), n=3)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for output in result.outputs:
        assert {one.token_id for one in output.logprobs} <= set(output.token_ids)


def test_conversations(llm):
    first, second = llm.chat([HELLO, [*HELLO, {"role": "assistant", "content": "Hm"}, *HELLO]], GREEDY)
    assert first.outputs[0].finish_reason == "length" and first.text != second.text
    assert llm.chat(HELLO, GREEDY)[0].outputs == first.outputs


def test_tool_calls_are_put_together():
    tool = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
    }
    options = ChatOptions(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (result,) = LLM(talkative_engine(0, eagerness=7.0)).chat(HELLO, SamplingParams(seed=0, max_tokens=300), 1, options)
    assert [call["function"] for call in result.outputs[0].tool_calls] == [{"name": "now", "arguments": "{}"}]


def test_logprobs_of_texts(llm):
    texts = ["hello", list(b"hello world")]
    scores = llm.logprobs(texts, top=2)
    for text, given in zip(texts, scores):
        ids = list(text.encode()) if isinstance(text, str) else text
        with torch.no_grad():
            expected = llm.engine.core.runner.model(torch.tensor([ids])).logits_BTZ[0, :, :288].log_softmax(-1)
        assert given[0] is None and len(given) == len(ids)
        for at, one in enumerate(given[1:]):
            assert one.logprob == pytest.approx(float(expected[at, ids[at + 1]]), abs=1e-9) and len(one.top) == 2


def test_mistakes_are_found_before_anything_runs(llm):
    before = llm.engine.core.runner.tokens_run
    with pytest.raises(ConfigError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(FieldError, match="empty"):
        llm.generate(["a", ""], GREEDY)
    assert llm.engine.core.runner.tokens_run == before and llm.generate([], GREEDY) == []


def test_prompts_of_other_kinds(llm):
    """Integers of any library are token ids; what is none is refused, and never meets the model."""
    ids = list(b"import os")
    expected = llm.generate(ids, GREEDY)[0].outputs
    for same in (np.array(ids), torch.tensor(ids), [np.array(ids)], [torch.tensor(ids)], tuple(ids), bytes(ids)):
        assert [result.outputs for result in llm.generate(same, GREEDY)] == [expected]
    assert llm.generate([True, 2], GREEDY)[0].prompt_ids == [1, 2]
    for wrong in (None, 5.5, [1.5], [["a"]], [None], [[1, 2.0]]):
        with pytest.raises(FieldError, match="token ids"):
            llm.generate(wrong, GREEDY)
    for wrong in ("hello", ["hello"], [HELLO, "hello"], [[3]]):
        with pytest.raises(FieldError, match="list of messages"):
            llm.chat(wrong, GREEDY)


def test_what_no_request_can_say_is_refused(llm):
    """Rather than waited for, or met by the engine's thread, which would end for everybody."""
    for n in (0, -1, 2.5, None):
        for ask in (lambda n: llm.generate("a", GREEDY, n), lambda n: llm.chat(HELLO, GREEDY, n)):
            with pytest.raises(FieldError, match="at least 1"):
                ask(n)
    with pytest.raises(FieldError, match="no prompt"):
        llm.engine.complete([], GREEDY)
    for params in ({"max_tokens": 3}, [None], ["x"], 5):
        with pytest.raises(ConfigError, match="give SamplingParams"):
            llm.generate(["a"], params)
    for wrong in (
        {"priority": "high"},
        {"priority": 10**30},
        {"session_id": 3},
        {"cache_salt": None},
        {"request_id": b""},
    ):
        with pytest.raises(FieldError, match=next(iter(wrong))):
            Service(**wrong)
    for wrong in ({"stop": 5}, {"stop_ids": 5}, {"stop_ids": "a"}, {"logit_bias": {65: 3.0}}, {"logit_bias": (65,)}):
        with pytest.raises(FieldError, match=next(iter(wrong))):
            SamplingParams(**wrong)


def test_a_single_stop_string_is_no_list_of_characters(llm):
    text = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=40))[0].text
    assert SamplingParams(stop=text[7:9]) == SamplingParams(stop=(text[7:9],))
    (result,) = llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=40, stop=text[7:9]))
    assert result.text == text[: text.index(text[7:9])]


def test_a_failure_is_heard_though_others_end_well_behind_it(monkeypatch, llm):
    """All of it within one step, before anybody has looked."""
    failure = RequestError("an injected fault")
    ends = iter([JobEnd(failure), JobEnd(None)])
    monkeypatch.setattr(LocalJob, "start", lambda job, listener: listener(next(ends)))
    with pytest.raises(RequestError, match="injected"):
        llm.generate(["a", "b"], GREEDY)


def test_a_shared_engine_stays_open(llm):
    with LLM(llm.engine) as other:
        other.generate("a", GREEDY)
    assert llm.generate("a", GREEDY)[0].outputs[0].finish_reason == "length"
