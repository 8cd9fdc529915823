"""Public clients and a public fuzzer against a real server: what they send is answered, and what they get they can read.

`bootstrap.py soak conformance` sends 10,000 generated requests; the suite sends fewer.
"""

from __future__ import annotations

from collections import Counter

import httpx
import pytest
from tiny_model import talkative_engine, tiny_engine

from perilune.serve.api import Limits, serve_in_thread

HELLO = [{"role": "user", "content": "Hi"}]
LIMITS = Limits(output_tokens=8, choices=2, prompts=4)


@pytest.fixture(scope="module")
def server():
    """Random weights; no answer is longer than eight tokens."""
    engine = tiny_engine(context_length=512)
    with serve_in_thread(engine, limits=LIMITS) as handle:
        yield handle
    engine.close()


@pytest.fixture(scope="module")
def talkative():
    """Random weights that come to an end under any grammar."""
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    engine = talkative_engine()
    with serve_in_thread(engine) as handle:
        yield handle
    engine.close()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_generated_requests_never_break_the_server(server, count):
    """schemathesis makes requests from the OpenAPI document, valid ones and others: no 500, no hang, answers as promised."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings

    wanted = count(full=10_000, reduced=90)
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/responses", "/tokenize"}
    statuses: Counter[int] = Counter()

    def fuzz(operation, examples: int) -> None:
        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def check(case):
            response = case.call(base_url=server.url, timeout=60)
            statuses[response.status_code] += 1
            assert response.status_code not in (422, 500, 502, 504), (response.status_code, response.text[:300])
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.text[:300]
            elif response.headers["content-type"][0].startswith("application/json"):
                operation.validate_response(response)

        check()

    posts = [operation for operation in operations if operation.method == "post"]
    for operation in operations:
        fuzz(operation, -(-wanted // len(posts)) if operation in posts else 3)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    print(f"{statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert statuses[200] > 0.02 * wanted and statuses.total() >= wanted
    assert len(server.context.exchanges) == 0 and server.context.engine.admin.check_invariants() == []


def test_langchain_talks_streams_and_calls(talkative):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    chat = langchain.ChatOpenAI(
        base_url=talkative.url + "/v1", api_key="none", model="tiny", seed=1, max_tokens=60, max_retries=0
    )  # fmt: skip
    whole = chat.invoke("Hi")
    assert isinstance(whole.content, str) and whole.usage_metadata["output_tokens"] > 0
    streamed = list(chat.stream("Hi", stream_usage=True))
    assert "".join(str(chunk.content) for chunk in streamed) == whole.content
    tool = {"type": "function", "function": {"name": "look", "description": "Look", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}}}  # fmt: skip
    called = (
        chat.bind_tools([tool], tool_choice="required", parallel_tool_calls=False).bind(max_tokens=400).invoke("Hi")
    )
    assert called.tool_calls[0]["name"] == "look" and isinstance(called.tool_calls[0]["args"]["n"], int)


def test_instructor_gets_its_type(talkative):
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    import openai
    import pydantic

    class Choice(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        n: int = pydantic.Field(ge=1, le=9)
        yes: bool

    client = openai.OpenAI(base_url=talkative.url + "/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        made = instructor.from_openai(client, mode=mode).create(
            model="tiny", messages=HELLO, response_model=Choice, max_retries=0, max_tokens=300, seed=2
        )
        assert isinstance(made, Choice)


def test_lm_eval_scores_a_local_task(server, tmp_path):
    """Its client for local completions reads log-probabilities of prompts and texts until a stop string."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=server.url + "/v1/completions", model="tiny", tokenizer_backend=None, tokenized_requests=False,
        max_length=400, batch_size=1, num_concurrent=1, max_retries=1,
    )  # fmt: skip
    text = Instance("generate_until", {}, ("one two", {"until": ["\n"], "max_gen_toks": 6, "temperature": 0}), 0)
    assert isinstance(model.generate_until([text], disable_tqdm=True)[0], str)

    # Scored ids, as its client sends them for multiple choice: the sum must be that of the server's own scores.
    prompt, ending = list(b"one two"), list(b" three")
    answer = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": prompt + ending, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1},
        timeout=60,
    ).json()
    scored = model.parse_logprobs(answer, tokens=[prompt + ending], ctxlens=[len(prompt)])  # pyright: ignore
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[0][0] == pytest.approx(sum(logprobs[len(prompt) : -1]))
    assert scored[0][1] in (True, False) and len(logprobs) == len(prompt + ending) + 1
