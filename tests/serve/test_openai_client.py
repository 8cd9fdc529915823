"""The official client against a real model: every helper that it has for chats, completions and responses."""

from __future__ import annotations

import asyncio
import json
import math
import time

import httpx
import openai
import pydantic
import pytest
import torch
from tiny_model import scripted_engine, talkative_engine, tiny_engine

from perilune.serve.api import serve_in_thread
from perilune.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
SPECIAL = TOKENIZER.special
HELLO = [{"role": "user", "content": "Hi"}]


def tag(kind: int, text: str) -> list[int]:
    return [kind, *TOKENIZER.encode(text), SPECIAL.sep]


def answer(response: str, *, think: str = "", calls: str = "") -> list[int]:
    """Ids of an assistant's message behind a prompt that has opened think; `calls` names tools without arguments."""
    ids = [*TOKENIZER.encode(think), *tag(SPECIAL.close, "think"), *tag(SPECIAL.open, "response")]
    ids += [*TOKENIZER.encode(response), *tag(SPECIAL.close, "response")]
    if calls:
        ids += tag(SPECIAL.open, "tools")
        for number, name in enumerate(calls.split(), 1):
            ids += tag(SPECIAL.open, f'call tool="{name}" index="{number}"')
            ids += [*tag(SPECIAL.open, 'argument key="q" type="string"'), *TOKENIZER.encode('a "b"')]
            ids += [*tag(SPECIAL.close, "argument"), *tag(SPECIAL.close, "call")]
        ids += tag(SPECIAL.close, "tools")
    return [*ids, *tag(SPECIAL.close, "message"), SPECIAL.end_of_msg]


@pytest.fixture(scope="module")
def scripted():
    """A client of a model that thinks, answers and calls, always the same."""
    engine = scripted_engine(answer("It is 4.", think="Two and two", calls="look look"), thinking=True)
    with serve_in_thread(engine) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    engine.close()


@pytest.fixture(scope="module")
def tiny():
    """A client of a model with random weights."""
    engine = tiny_engine(dtype=torch.float64)
    with serve_in_thread(engine) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    engine.close()


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}  # fmt: skip
FLAT = {"type": "function", "name": "look", "parameters": TOOL["function"]["parameters"], "strict": False}


def name_of(client) -> str:
    return client.models.list().data[0].id


def test_a_chat_with_reasoning_and_calls(scripted):
    whole = scripted.chat.completions.create(model=name_of(scripted), messages=HELLO, tools=[TOOL], temperature=0)
    message = whole.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("It is 4.", "Two and two", "Two and two")
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"q": 'a "b"'}] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("Two and two") + len(tag(0, "think"))
    with scripted.chat.completions.stream(
        model=name_of(scripted), messages=HELLO, tools=[TOOL], temperature=0, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds  # fmt: skip
    assert final.choices[0].message.content == "It is 4." and len(final.choices[0].message.tool_calls) == 2
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_a_response_with_reasoning_and_calls(scripted):
    request = {"model": name_of(scripted), "input": "Hi", "tools": [FLAT], "temperature": 0}
    whole = scripted.responses.create(**request)
    assert whole.output_text == "It is 4." and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert json.loads(whole.output[2].arguments) == {"q": 'a "b"'}
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with scripted.responses.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert final.output_text == whole.output_text and len(final.output) == 4
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "It is 4."
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= {e.type for e in events}


def test_a_response_goes_on_from_its_own_items(scripted):
    first = scripted.responses.create(model=name_of(scripted), input="Hi", tools=[FLAT], temperature=0)
    calls = [item for item in first.output if item.type == "function_call"]
    history = [
        {"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in first.output),
        *({"type": "function_call_output", "call_id": call.call_id, "output": "found"} for call in calls),
    ]  # fmt: skip
    second = scripted.responses.create(
        model=name_of(scripted), input=history, tools=[FLAT], instructions="Be brief.", temperature=0
    )
    assert second.output_text == "It is 4."
    third = scripted.responses.create(model=name_of(scripted), input=history, tools=[FLAT], temperature=0)
    assert third.usage.input_tokens_details.cached_tokens > 0, "the first turn was not recognised"


def test_a_response_that_is_cut_or_refused(scripted):
    cut = scripted.responses.create(model=name_of(scripted), input="Hi", max_output_tokens=3, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        scripted.responses.create(model=name_of(scripted), input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        scripted.responses.create(model=name_of(scripted), input="Hi", tools=[{"type": "web_search"}])


def test_parsed_answers_have_the_type():
    class City(pydantic.BaseModel):
        name: str
        size: int

    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    engine = talkative_engine()
    with serve_in_thread(engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        request = {"model": "tiny", "seed": 1, "temperature": 1}
        parsed = client.chat.completions.parse(messages=HELLO, response_format=City, max_tokens=400, **request)
        assert isinstance(parsed.choices[0].message.parsed, City)
        response = client.responses.parse(
            model="tiny", input="Hi", text_format=City, max_output_tokens=400, extra_body={"seed": 1}
        )
        assert isinstance(response.output_parsed, City)
        for form, allowed in (({"choice": ["red", "blue"]}, ("red", "blue")), ({"regex": "[ab]{3}"}, None)):
            text = client.chat.completions.create(
                messages=HELLO, extra_body={"structured_outputs": form}, max_tokens=50, **request
            ).choices[0].message.content  # fmt: skip
            assert text in allowed if allowed else (len(text) == 3 and set(text) <= {"a", "b"})
            text = client.completions.create(
                prompt="x", extra_body={"structured_outputs": form}, max_tokens=50, **request
            ).choices[0].text  # fmt: skip
            assert text in allowed if allowed else len(text) == 3
    engine.close()


def test_logprobs_of_prompt_and_answer_agree_with_each_other(tiny):
    """What was drawn is scored again as a prompt: the same tokens have the same log-probabilities."""
    request = {"model": "tiny", "temperature": 0, "logprobs": 2, "echo": True}
    first = tiny.completions.create(prompt="one two", max_tokens=6, extra_body={"return_token_ids": True}, **request)
    drawn = first.choices[0].logprobs
    assert "".join(drawn.tokens[:7]) == "one two" and drawn.token_logprobs[0] is None and len(drawn.tokens) == 13
    ids = [*TOKENIZER.encode("one two"), *first.choices[0].token_ids]
    scored = tiny.completions.create(prompt=ids, max_tokens=0, **request).choices[0].logprobs
    assert scored.tokens == drawn.tokens
    for one, other in zip(drawn.token_logprobs[1:], scored.token_logprobs[1:], strict=True):
        assert math.isclose(one, other, rel_tol=0, abs_tol=1e-9)
    chat = tiny.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = chat.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode(errors="replace") == chat.choices[0].message.content  # fmt: skip


def test_a_seed_gives_the_same_text_alone_and_in_company(tiny):
    request = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 5, "temperature": 1}
    alone = tiny.chat.completions.create(**request).choices[0].message.content
    several = tiny.chat.completions.create(**request, n=4).choices
    assert several[0].message.content == alone and len({choice.message.content for choice in several}) > 1


def test_bias_bounds_and_stops_reach_the_model(tiny):
    x = ord("x")
    text = tiny.completions.create(model="tiny", prompt="a", max_tokens=5, logit_bias={str(x): 100}).choices[0].text
    assert text == "xxxxx"
    cut = tiny.completions.create(model="tiny", prompt="a", max_tokens=5, logit_bias={str(x): 100}, stop=["xx"])
    assert cut.choices[0].text == "" and cut.choices[0].finish_reason == "stop"
    bounded = tiny.completions.create(
        model="tiny", prompt="a", max_tokens=9, logit_bias={str(x): 100}, extra_body={"min_tokens": 4, "stop_token_ids": [x]}
    )  # fmt: skip
    assert bounded.usage.completion_tokens == 5, "four other tokens, then the one that ends"
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        tiny.completions.create(model="tiny", prompt="a", logit_bias={"100000": 1})


def test_the_async_client_streams_everything_and_may_leave(tiny, scripted):
    """Its streams hold what whole answers hold; one that is closed early ends its request."""
    request = {"model": "tiny", "prompt": "one two", "max_tokens": 9, "temperature": 0}

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=str(tiny.base_url), api_key="none", max_retries=0) as client:
            whole = await client.completions.create(**request)
            stream = await client.completions.create(**request, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
            assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 9
            stream = await client.completions.create(**request | {"max_tokens": 8000}, stream=True)
            await anext(stream)
            await stream.close()
        async with openai.AsyncOpenAI(base_url=str(scripted.base_url), api_key="none", max_retries=0) as client:
            async with client.chat.completions.stream(model="tiny", messages=HELLO, temperature=0) as events:
                assert (await events.get_final_completion()).choices[0].message.content == "It is 4."
            async with client.responses.stream(model="tiny", input="Hi", temperature=0) as events:
                await events.until_done()
                assert (await events.get_final_response()).output_text == "It is 4."

    asyncio.run(go())
    with httpx.Client(base_url=str(tiny.base_url).removesuffix("/v1/"), timeout=60) as http:
        while http.get("/ready").json()["active"]:
            time.sleep(0.02)


async def _many(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"messages": HELLO, "max_tokens": 6, "temperature": 0}
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(12)))
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


def test_many_clients_get_the_same_answer(tiny):
    assert len(set(asyncio.run(_many(str(tiny.base_url).removesuffix("/v1/"))))) == 1
