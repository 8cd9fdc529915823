"""The official client against a real server and a real, random, tiny model: tools, schemas, streams, second turns."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest
from tiny_model import scripted_engine, talkative_engine

from perilune.serve.api import serve_in_thread
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml import encode_segments, open_tag, render


class Weather(pydantic.BaseModel):
    """Where and for how long."""

    model_config = pydantic.ConfigDict(extra="forbid")

    days: int = pydantic.Field(ge=1, le=9)
    warm: bool | None


HELLO = [{"role": "user", "content": "Hi"}]
TOOL = openai.pydantic_function_tool(Weather)
ONCE = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}


@pytest.fixture(scope="module")
def client():
    engine = talkative_engine(0, eagerness=7.0)
    with serve_in_thread(engine) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def scripted_client(answer, *, thinking=False):
    """A server whose every answer is `answer`."""
    tokenizer = ByteTokenizer()
    opened = [*open_tag("message", {"role": "assistant"}), *open_tag("think" if thinking else "response")]
    whole = render(tokenizer, [answer], thinking=thinking, add_generation_prompt=False).ids
    return serve_in_thread(scripted_engine(whole[len(encode_segments(tokenizer, opened)) :], thinking=thinking))


def test_a_required_call_and_its_second_turn(client):
    first = client.chat.completions.create(model="tiny", messages=HELLO, seed=1, **ONCE)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "Weather" and call.id.startswith("call_")
    Weather.model_validate_json(call.function.arguments)
    history = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    second = client.chat.completions.create(
        model="tiny", messages=history, tools=[TOOL], tool_choice="auto", max_tokens=2
    )
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2
    # The option stood between the question and the answer; the next request has the answer directly behind the question.
    question = render(ByteTokenizer(), HELLO, tools=[TOOL], thinking=False, add_generation_prompt=False).ids
    assert second.usage.prompt_tokens_details.cached_tokens == len(question) // 4 * 4


def test_streamed_calls_are_those_of_the_whole_answer(client):
    whole = client.chat.completions.create(model="tiny", messages=HELLO, seed=2, **ONCE).choices[0]
    with client.chat.completions.stream(model="tiny", messages=HELLO, seed=2, **ONCE) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert last.finish_reason == whole.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in last.message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert (last.message.content or "") == (whole.message.content or "")
    assert isinstance(last.message.tool_calls[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize("seed", range(3))
def test_a_parsed_answer(client, seed):
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, seed=seed, response_format=Weather, max_tokens=300
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather) and parsed.choices[0].finish_reason == "stop"


def test_errors_name_the_field(client):
    for body, param in [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, "messages[0]"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": "tiny", "messages": HELLO} | body)
        assert caught.value.param == param, caught.value


def test_reasoning_and_answer_are_apart():
    with scripted_client({"content": "4", "role": "assistant", "reasoning_content": "2+2"}, thinking=True) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        options = {"model": "tiny", "messages": HELLO, "temperature": 0, "reasoning_effort": "low", "max_tokens": 120}
        message = client.chat.completions.create(**options).choices[0].message
        assert (message.content, message.reasoning_content, message.model_extra["reasoning"]) == ("4", "2+2", "2+2")
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "4"
        assert "".join((chunk.delta.model_extra or {}).get("reasoning_content", "") for chunk in chunks) == "2+2"
        assert chunks[-1].finish_reason == "stop"


def test_calls_of_an_unconstrained_model():
    arguments = {"t": 'é"\n', "l": [1, {"a": None}]}
    calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name in ("Weather", "rm")]
    with scripted_client({"role": "assistant", "content": "so", "tool_calls": calls}) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        options = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 500}
        loose = {"type": "function", "function": {"name": "Weather"}}
        choice = client.chat.completions.create(**options, tools=[loose]).choices[0]
        assert choice.message.content == "so" and choice.finish_reason == "tool_calls"
        assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [arguments] * 2
        assert [c.function.name for c in choice.message.tool_calls] == ["Weather", "rm"]
        assert len({c.id for c in choice.message.tool_calls}) == 2
        choice = client.chat.completions.create(**options).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("so", None, "stop")
