"""The HTTP application over an engine without a model: answers, streams, errors, limits, keys."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from fake_engine import FakeEngine

from perilune.errors import CheckpointError
from perilune.serve.api import Limits, create_app
from perilune.serve.request import SamplingParams, Service, Structured

HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


def call(method, path, *, engine=None, headers=None, limits=None, api_keys=(), hosts=None, **request):
    """One request to a fresh application."""

    async def go() -> httpx.Response:
        app = create_app(engine or FakeEngine(), limits=limits, api_keys=api_keys, hosts=hosts)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app):
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, headers=headers, **request)

    return asyncio.run(go())


def chat(body, **options):
    return call("POST", "/v1/chat/completions", json=HELLO | body, **options)


def events(response) -> list[dict]:
    """Data of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


def error(response, status, *, param=None, code=None) -> str:
    """Check the envelope; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code), body
    assert body["error"]["type"] and body["error"]["message"]
    return body["error"]["message"]


def test_chat_answer():
    engine = FakeEngine()
    body = chat({"model": "fake"}, engine=engine).json()
    assert body["object"] == "chat.completion" and body["model"] == "fake" and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello wörld", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details":
            {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }  # fmt: skip
    assert engine.asked == [("chat", HELLO["messages"], SamplingParams(max_tokens=100), 1)]


def test_every_sampling_field_arrives():
    engine = FakeEngine()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_completion_tokens": 9, "n": 2,
              "max_tokens": 50, "stop": ["a", "b"], "stop_token_ids": [4], "user": "someone", "vendor_extra": {},
              "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"7": -2},
              "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True, "logprobs": True,
              "top_logprobs": 3, "prompt_logprobs": 2, "structured_outputs": {"choice": ["a", "b"]}, "priority": -3,
              "session_id": "s", "cache_salt": "t"}  # fmt: skip
    assert len(chat(fields, engine=engine).json()["choices"]) == 2
    expected = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, max_tokens=9, stop=("a", "b"), stop_ids=(4,),
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias=((7, -2.0),), min_tokens=2,
        ignore_eos=True, include_stop=True, logprobs=3, prompt_logprobs=2, structured=Structured("choice", ["a", "b"]),
    )  # fmt: skip
    assert engine.asked[0][2:] == (expected, 2)
    assert replace(engine.service, request_id="") == Service(priority=-3, session_id="s", cache_salt="t")
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "seed", "max_tokens", "n", "stream", "logit_bias"))
    chat(nulls, engine=engine)
    chat({"stop": "x", "top_k": -1}, engine=engine)
    assert engine.asked[1][2] == SamplingParams(max_tokens=100)
    assert engine.asked[2][2] == SamplingParams(max_tokens=100, stop=("x",))


def test_text_parts_are_joined_and_reasoning_is_passed_on():
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    history = [{"role": "user", "content": parts}, {"role": "assistant", "content": "", "reasoning_content": "hm"}]
    chat({"messages": history}, engine=engine)
    assert engine.asked[0][1] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning": "hm"},
    ]


def test_t57_finish_reason_is_null_until_the_last_chunk():
    chunks = events(chat({"stream": True, "stream_options": {"include_usage": True}}))
    *choices, usage = chunks
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert choices[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in choices) == "Hello wörld"
    assert all(chunk["usage"] is None for chunk in choices)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_usage_is_only_streamed_when_asked_for():
    chunks = events(chat({"stream": True}))
    assert not any("usage" in chunk for chunk in chunks)


def test_streamed_choices_end_one_by_one():
    chunks = events(chat({"stream": True, "n": 2}))
    for row in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == row]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_completions_take_strings_ids_and_lists_of_them():
    engine = FakeEngine()
    for prompt, rows in (("abc", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3], [4]], 3)):
        body = call("POST", "/v1/completions", json={"prompt": prompt}, engine=engine).json()
        assert body["object"] == "text_completion"
        assert [c["index"] for c in body["choices"]] == list(range(rows))
        assert {c["text"] for c in body["choices"]} == {"Hello wörld"}
    assert [asked[1] for asked in engine.asked] == [["abc"], ["a", "b"], [[1, 2]], [[1], [2, 3], [4]]]
    chunks = events(call("POST", "/v1/completions", json={"prompt": "a", "stream": True}))
    assert [c["choices"][0]["text"] for c in chunks] == ["Hel", "lo", " wörld"]


def test_models_health_and_page():
    listing = call("GET", "/v1/models").json()
    assert [card["id"] for card in listing["data"]] == ["fake"] and listing["object"] == "list"
    assert call("GET", "/v1/models/fake").json()["context_length"] == 100
    assert call("GET", "/health").json()["status"] == "ok"
    page = call("GET", "/")
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert "access-control-allow-origin" not in page.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("DELETE", "/", 405)],
)
def test_t58_unknown_paths_and_methods_use_the_envelope(method, path, status):
    response = call(method, path)
    error(response, status)
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", 5, "model"),
        ("messages", "hi", "messages"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"content": "a"}], "messages[0].role"),
        ("temperature", "hot", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", [], "top_p"),
        ("top_k", 1.5, "top_k"),
        ("min_p", {}, "min_p"),
        ("seed", "1", "seed"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_completion_tokens", "9", "max_completion_tokens"),
        ("stop", 5, "stop"),
        ("stop", ["a", 5], "stop[1]"),
        ("stop_token_ids", ["a"], "stop_token_ids[0]"),
        ("n", "2", "n"),
        ("stream", "yes", "stream"),
        ("stream_options", True, "stream_options"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("logit_bias", [], "logit_bias"),
        ("response_format", "json", "response_format"),
        ("tools", {}, "tools"),
        ("tools", ["f"], "tools[0]"),
        ("tool_choice", 5, "tool_choice"),
        ("parallel_tool_calls", "no", "parallel_tool_calls"),
        ("reasoning_effort", 3, "reasoning_effort"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_t58_a_wrong_type_in_each_field_uses_the_envelope(field, value, param):
    error(chat({field: value}), 400, param=param, code="invalid_type")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": -1}, "temperature", None),
        ({"top_p": 0}, "top_p", None),
        ({"top_k": -2}, "top_k", None),
        ({"min_p": 1.5}, "min_p", None),
        ({"seed": -1}, "seed", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_completion_tokens": 0}, "max_completion_tokens", None),
        ({"n": 0}, "n", None),
        ({"n": 9}, "n", None),
        ({"stop": ""}, "stop", None),
        ({"stop_token_ids": [-1]}, "stop_token_ids", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user"}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", None),
        ({"messages": [{"role": "user", "content": "a"}] * 6}, "messages", "context_length_exceeded"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"presence_penalty": 2.5}, "presence_penalty", None),
        ({"frequency_penalty": -3}, "frequency_penalty", None),
        ({"repetition_penalty": 0}, "repetition_penalty", None),
        ({"logit_bias": {"x": 1}}, "logit_bias", None),
        ({"logit_bias": {"1": 101}}, "logit_bias", None),
        ({"min_tokens": 101}, "min_tokens", None),
        ({"priority": 10000}, "priority", None),
        ({"cache_salt": "x" * 300}, "cache_salt", None),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", None),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", None),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            None,
        ),
        ({"audio": {}}, "audio", "unsupported_parameter"),
    ],
)
def test_values_that_cannot_be_used_name_the_field(body, param, code):
    error(chat(body), 400, param=param, code=code)


def test_fields_that_ask_for_nothing_unusual_are_accepted():
    defaults = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "tools": [],
                "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0}  # fmt: skip
    assert chat(defaults).status_code == 200


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], 2], 5, [["a"]], [True], None])
def test_prompts_of_other_forms_use_the_envelope(prompt):
    response = call("POST", "/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("prompt")


def test_too_many_prompts():
    error(call("POST", "/v1/completions", json={"prompt": ["a"] * 65}), 400, param="prompt")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"temperature": NaN}', b'{"messages": [' + b"[" * 5000]
)
def test_bodies_that_are_not_requests_use_the_envelope(body):
    response = call("POST", "/v1/chat/completions", content=body)
    assert response.status_code == 400 and set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_model():
    error(chat({"model": "gpt"}), 404, param="model", code="model_not_found")
    error(call("GET", "/v1/models/gpt"), 404, param="model", code="model_not_found")


def test_a_large_body_is_refused_whatever_its_headers_say():
    async def drip():
        for _ in range(20):
            yield b"x" * 100

    for content in (b"x" * 2000, drip()):
        response = call("POST", "/v1/completions", content=content, limits=Limits(body_bytes=1000))
        error(response, 413, code="body_too_large")


def test_errors_of_the_model_are_500_and_in_a_stream_an_event():
    engine = FakeEngine(pieces=["a", CheckpointError("the weights have diverged")])
    assert error(chat({}, engine=engine), 500) == "the weights have diverged"
    response = chat({"stream": True}, engine=engine)
    assert response.status_code == 200
    last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["message"] == "the weights have diverged" and last["error"]["type"] == "server_error"
    engine = FakeEngine(pieces=[ZeroDivisionError("secret detail")])
    assert "secret" not in error(chat({}, engine=engine), 500)


def test_api_keys():
    keys = ("first", "second")
    for given in (None, "Bearer wrong", "Bearer ", "first", "Basic first", "Bearer firstx"):
        headers = {} if given is None else {"Authorization": given}
        response = chat({}, api_keys=keys, headers=headers)
        error(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    keys = (*keys, "schlüssel", " from a file\n")
    for given in ("Bearer first", "bearer second", "Bearer schlüssel".encode(), "Bearer from a file"):
        assert chat({}, api_keys=keys, headers={"Authorization": given}).status_code == 200
    error(call("GET", "/v1/models", api_keys=keys), 401, code="invalid_api_key")
    assert call("GET", "/health", api_keys=keys).status_code == 200


def test_pages_of_other_sites_are_refused():
    hosts = frozenset(("127.0.0.1", "localhost", "::1"))
    same = {"Origin": "http://127.0.0.1:8000"}
    assert chat({}, hosts=hosts, headers=same).status_code == 200
    assert chat({}, hosts=hosts, headers={"Host": "[::1]:8000"}).status_code == 200
    assert chat({}, hosts=hosts, headers={"Host": "localhost"}).status_code == 200
    error(chat({}, headers={"Origin": "https://evil.example"}), 403)
    error(chat({}, headers={"Origin": "null"}), 403)
    error(chat({}, hosts=hosts, headers={"Host": "evil.example:8000"}), 403)
    preflight = call("OPTIONS", "/v1/chat/completions", headers={"Origin": "https://evil.example"})
    assert preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers


def test_a_response_without_items_names_its_own_field():
    error(call("POST", "/v1/responses", json={"input": []}), 400, param="input")
