"""What answers hold beside their text: log-probabilities, echoed prompts, ids, token counts; and that they keep the schema."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine
from test_api import call, chat, error, events

from perilune.serve.api import Limits, create_app, schemas
from perilune.serve.api.answers import usage_body
from perilune.serve.api.logs import JsonFormatter
from perilune.serve.engine import EngineFailed
from perilune.serve.request import Delta, TokenLogprob, Usage

H, I, EURO = ord("H"), ord("i"), list("€".encode())
PIECES = [
    Delta(0, "H", logprobs=(TokenLogprob(H, -0.5, ((H, -0.5), (I, -1.5)), 0),), token_ids=(H,), reasoning="hm"),
    Delta(0, "i", logprobs=(TokenLogprob(I, -math.inf, ((H, -0.25),), 1),), token_ids=(I,)),
]


def completion(body, **options):
    return call("POST", "/v1/completions", json={"prompt": "ab"} | body, **options)


def keep_schema(value, kind) -> None:
    """The answer has the type, and no field that the type does not know."""
    typed = msgspec.convert(value, kind, strict=True)

    def check(value, typed) -> None:
        if isinstance(typed, msgspec.Struct):
            assert set(value) <= set(typed.__struct_fields__), (set(value), type(typed))
            for key, part in value.items():
                check(part, getattr(typed, key))
        elif isinstance(typed, list):
            for pair in zip(value, typed, strict=True):
                check(*pair)

    check(value, typed)


def test_chat_logprobs_have_text_bytes_and_alternatives():
    body = chat({"logprobs": True, "top_logprobs": 2, "return_token_ids": True}, engine=FakeEngine(PIECES)).json()
    keep_schema(body, schemas.ChatBody)
    choice = body["choices"][0]
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "H", "logprob": -0.5, "bytes": [H],
        "top_logprobs": [{"token": "H", "logprob": -0.5, "bytes": [H]}, {"token": "i", "logprob": -1.5, "bytes": [I]}],
    }  # fmt: skip
    assert second["logprob"] == -9999.0, "JSON has no infinity"
    assert choice["token_ids"] == [H, I] and choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
    assert "token_ids" not in chat({}, engine=FakeEngine(PIECES)).json()["choices"][0]
    chunks = events(chat({"logprobs": True, "stream": True}, engine=FakeEngine(PIECES)))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in streamed] == ["H", "i"]


def test_completion_logprobs_and_an_echoed_prompt():
    engine = FakeEngine(PIECES)
    engine.prompt_logprobs = [[None, TokenLogprob(ord("b"), -2.0, ((H, -0.1),))]]
    body = completion({"logprobs": 1, "echo": True, "prompt_logprobs": 1}, engine=engine).json()
    keep_schema(body, schemas.CompletionBody)
    choice = body["choices"][0]
    assert choice["text"] == "abHi" and engine.asked[0][2].prompt_logprobs == 1
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "H", "i"],
        "token_logprobs": [None, -2.0, -0.5, -9999.0],
        "top_logprobs": [None, {"H": -0.1, "b": -2.0}, {"H": -0.5, "i": -1.5}, {"H": -0.25, "i": -9999.0}],
        "text_offset": [0, 1, 2, 3],
    }
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(H)] == {"logprob": -0.1, "decoded_token": "H"}
    chunks = events(completion({"logprobs": 1, "echo": True, "stream": True}, engine=engine))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", "H", "i"]
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [2]


def test_a_prompt_alone_can_be_scored():
    engine = FakeEngine(PIECES)
    engine.prompt_logprobs = [[None, TokenLogprob(ord("b"), -2.0)]]
    asked = {"logprobs": 0, "echo": True, "max_tokens": 0, "return_token_ids": True}
    body = completion(asked, engine=engine).json()
    (choice,) = body["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["token_ids"] == [] and choice["finish_reason"] == "length"
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (0, body["usage"]["prompt_tokens"])
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(completion(asked | {"stream": True} | options, engine=engine))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "ab"
    assert {token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())} == set()
    assert {chunk["usage"]["completion_tokens"] for chunk in chunks} == {0}
    error(completion({"max_tokens": 0}), 400, param="max_tokens")


def test_offsets_of_an_echoed_prompt_count_characters():
    """The bytes of a character are tokens of their own here; all of them begin where it begins."""
    engine, prompt = FakeEngine(PIECES), "aé日b"
    engine.prompt_logprobs = [[None, *(TokenLogprob(byte, -1.0) for byte in prompt.encode()[1:])]]
    asked = {"prompt": prompt, "logprobs": 0, "echo": True}
    (choice,) = completion(asked, engine=engine).json()["choices"]
    assert choice["text"] == prompt + "Hi"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 5]


def test_answers_keep_their_schemas():
    keep_schema(chat({"n": 2}).json(), schemas.ChatBody)
    keep_schema(completion({"prompt": ["a", [1, 2]][:1]}).json(), schemas.CompletionBody)
    keep_schema(call("GET", "/v1/models").json(), schemas.ModelList)
    keep_schema(call("GET", "/v1/models/fake").json(), schemas.Card)
    keep_schema(call("GET", "/ready").json(), schemas.Ready)
    keep_schema(call("GET", "/version").json(), schemas.Version)
    keep_schema(chat({"n": 0}).json(), schemas.ErrorBody)


def test_usage_can_be_in_every_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(chat({"stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3


def test_text_and_conversations_become_tokens_and_back():
    body = call("POST", "/tokenize", json={"prompt": "a€", "return_token_strs": True}).json()
    keep_schema(body, schemas.TokenizeBody)
    assert body["tokens"] == [ord("a"), *EURO] and body["count"] == 4 and body["token_strs"][0] == "a"
    assert call("POST", "/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "a€"}
    conversation = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    assert call("POST", "/tokenize", json=conversation).json()["tokens"] == [1, 0]
    error(call("POST", "/tokenize", json={}), 400, param="prompt")
    error(call("POST", "/detokenize", json={"tokens": [10**6]}), 400, param="tokens")


def test_images_come_with_the_request_or_not_at_all():
    def ask(part, engine=None):
        return chat({"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}, engine=engine)

    engine = FakeEngine()
    ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, engine)
    assert engine.asked[0][1][0]["content"] == [{"type": "image", "image": b"hi"}, {"type": "text", "text": "?"}]
    for url in ("https://example.org/a.png", "file:///etc/passwd", "data:text/html;base64,aGk=", "data:image/png,hi",
                "data:image/png;base64,a"):  # fmt: skip
        part = {"type": "image_url", "image_url": {"url": url}}
        error(ask(part), 400, param="messages[0].content[0]")
    error(ask({"type": "video_url"}), 400, param="messages[0].content[0]")


def test_an_answer_that_takes_too_long_is_given_up():
    engine = FakeEngine(gate=threading.Semaphore(1))
    limits = Limits(request_seconds=0.05)
    error(chat({}, engine=engine, limits=limits), 504, code="timeout")
    assert engine.jobs[0].closed
    engine.gate.release()
    response = chat({"stream": True}, engine=FakeEngine(gate=threading.Semaphore(1)), limits=limits)
    last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "timeout"


def test_no_answer_is_longer_than_the_server_allows():
    engine = FakeEngine()
    chat({"max_tokens": 50, "min_tokens": 20}, engine=engine, limits=Limits(output_tokens=8))
    assert (engine.asked[0][2].max_tokens, engine.asked[0][2].min_tokens) == (8, 8)


def test_request_ids_are_echoed_and_logged(caplog):
    with caplog.at_level("INFO", logger="perilune.serve.requests"):
        response = chat({}, headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert chat({"n": 0}).headers["x-request-id"].startswith("req-")
        assert call("GET", "/nothing").headers["x-request-id"]
        bad = chat({}, headers={"X-Request-Id": "two words"})
        assert bad.headers["x-request-id"].startswith("req-")
    fields = caplog.records[0].fields
    assert fields["request_id"] == "mine-1" and fields["status"] == 200 and fields["completion_tokens"] == 3
    assert fields["finish"] == "stop" and caplog.records[1].fields["status"] == 400


def test_log_lines_can_be_json():
    plain = logging.LogRecord("a.b", logging.WARNING, "", 0, "%s is %s", ("x", "ü"), None)
    line = json.loads(JsonFormatter().format(plain))
    assert line["message"] == "x is ü" and line["level"] == "warning" and line["time"].endswith("Z")
    request = logging.LogRecord("a.b", logging.INFO, "", 0, "text", (), None)
    request.fields = {"request_id": "r", "status": 200}
    assert {"request_id": "r", "status": 200}.items() <= json.loads(JsonFormatter().format(request)).items()


def test_metrics_have_own_and_common_names():
    async def go():
        app = create_app(FakeEngine())
        transport = httpx.ASGITransport(app=app)
        async with app.router.lifespan_context(app):
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "n": 2})
                return (await client.get("/metrics")).text

    text = asyncio.run(go())
    for line in (
        'perilune:requests_finished_total{finished_reason="stop",model_name="fake"} 2.0',
        'vllm:request_success_total{finished_reason="stop",model_name="fake"} 2.0',
        'vllm:prompt_tokens_total{model_name="fake"} 7.0',
        'vllm:generation_tokens_total{model_name="fake"} 6.0',
        'vllm:prefix_cache_hits_total{model_name="fake"} 3.0',
        'vllm:time_to_first_token_seconds_count{model_name="fake"} 1.0',
        'vllm:num_requests_running{model_name="fake"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="fake"} 0.0',
        'perilune:requests_active{model_name="fake"} 0.0',
    ):
        assert line in text.splitlines(), line


def test_the_openapi_document_names_every_route():
    document = call("GET", "/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"} <= set(document["paths"])
    names = json.dumps(document)
    for reference in {part.split('"')[0] for part in names.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]
    assert "security" not in document["paths"]["/v1/models"]["get"]
    guarded = call("GET", "/openapi.json", api_keys=("k",)).json()
    assert guarded["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}]


def test_an_engine_that_has_failed_asks_for_patience():
    response = chat({}, engine=FakeEngine(["a", EngineFailed("the model failed")]))
    error(response, 503, code="engine_failed")
    assert response.headers["retry-after"]
    engine = FakeEngine()
    engine.ready = False
    error(call("GET", "/ready", engine=engine), 503, code="engine_not_ready")


def test_usage_says_what_was_thought_and_drafted():
    body = usage_body(Usage(5, 2, 9, 4, 3, 1))
    keep_schema(body, schemas.UsageBody)
    assert body["completion_tokens_details"] == {
        "reasoning_tokens": 4, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1,
    }  # fmt: skip


@pytest.mark.parametrize("key", ["first_token_seconds", "queue_seconds"])
def test_timings_are_told(key):
    assert key in chat({}).json()["timings"]
