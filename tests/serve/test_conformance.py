"""Public clients and a public fuzzer against a real server: what they send is answered, and what they get they can read.

`bootstrap.py soak conformance` sends 10,000 generated requests; the suite sends fewer.
"""

from __future__ import annotations

import json
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


def test_lm_eval_runs_a_local_task(server, tmp_path, monkeypatch):
    """Its client for local completions, on a task of its own kind that lies in a file: scores are those of the server."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [{"q": f"{n} + 1 =", "a": [f" {n + 1}", f" {n + 2}"], "right": 0} for n in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    task = {
        "task": "sums", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}}, "doc_to_text": "{{q}}",
        "doc_to_choice": "{{a}}", "doc_to_target": "{{right}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML
    arguments = {
        "base_url": server.url + "/v1/completions", "model": "tiny", "tokenizer_backend": "remote", "max_length": 400,
        "max_retries": 1, "num_concurrent": 1,
    }  # fmt: skip
    results = lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=["sums"], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip

    def score(question: str, ending: str) -> float:
        body = {"prompt": question + ending, "max_tokens": 0, "logprobs": 0, "echo": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        return sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(question) :])

    for sample in results["samples"]["sums"]:
        document = sample["doc"]
        scores = [float(pair[0][0]) for pair in sample["resps"]]
        assert scores == pytest.approx([score(document["q"], ending) for ending in document["a"]], abs=1e-6)
    assert 0 <= results["results"]["sums"]["acc,none"] <= 1
