"""Tools, formats and reasoning over HTTP without a model: what reaches the engine, and how calls are written."""

from __future__ import annotations

import dataclasses

import pytest
from fake_engine import FakeEngine
from test_api import HELLO, chat, error, events

from perilune.serve.request import CallDelta, ChatOptions

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "extra": 1}}
CALLS = [
    "Hm",
    (CallDelta(0, "", "call_a", "f"),),
    (CallDelta(0, '{"k": '),),
    (CallDelta(0, '"v"}'), CallDelta(1, "", "call_b", "g")),
    (CallDelta(1, "{}"),),
]
WHOLE = [
    {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"k": "v"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def test_calls_of_a_whole_answer():
    choice = chat({}, engine=FakeEngine(CALLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": "Hm", "refusal": None, "tool_calls": WHOLE}
    message = chat({}, engine=FakeEngine(CALLS[1:])).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": None, "refusal": None, "tool_calls": WHOLE}
    assert "tool_calls" not in chat({}).json()["choices"][0]["message"]


def test_t60_streamed_calls_join_to_the_whole_answer():
    chunks = events(chat({"stream": True}, engine=FakeEngine(CALLS)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:] == [
        {"content": "Hm"},
        {"tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"k": '}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '"v"}'}},
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": ""}},
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ChatOptions()),
        ({"tools": [], "tool_choice": None, "parallel_tool_calls": None, "reasoning_effort": None}, ChatOptions(tools=[])),
        ({"tools": [TOOL]}, ChatOptions(tools=[TOOL])),
        ({"tools": [TOOL], "tool_choice": "required"}, ChatOptions(tools=[TOOL], tool_choice="required")),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
         ChatOptions(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})),
        ({"tools": [TOOL], "parallel_tool_calls": False}, ChatOptions(tools=[TOOL], parallel_tool_calls=False)),
        ({"response_format": {"type": "json_object"}}, ChatOptions(response_format={"type": "json_object"})),
        ({"reasoning_effort": "low"}, ChatOptions(effort="low")),
        ({"reasoning_effort": "none"}, ChatOptions(thinking=False)),
        ({"chat_template_kwargs": {"thinking": False, "other": 3}}, ChatOptions(thinking=False)),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "max"}, ChatOptions(thinking=True, effort="max")),
    ],
)  # fmt: skip
def test_options_reach_the_engine(body, expected):
    engine = FakeEngine()
    assert chat(body, engine=engine).status_code == 200
    assert dataclasses.replace(engine.options, tools=list(engine.options.tools)) == dataclasses.replace(
        expected, tools=list(expected.tools)
    )


def test_a_history_with_calls_reaches_the_engine():
    engine = FakeEngine()
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": WHOLE, "refusal": None},
        {"role": "tool", "tool_call_id": "call_b", "content": "4"},
        {"role": "system", "tools": [TOOL]},
    ]
    chat({"messages": history}, engine=engine)
    assert engine.asked[0][1] == [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": WHOLE},
        {"role": "tool", "content": "4", "tool_call_id": "call_b"},
        {"role": "system", "content": None, "tools": [TOOL]},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
    ],
)
def test_t58_options_that_are_no_options_name_the_field(body, param):
    error(chat(body), 400, param=param)
