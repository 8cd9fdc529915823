"""Option messages of the chat format: what they say, where they stand, what survives when they change."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_lists import json_values, message_lists, tools_lists

from perilune.errors import RequestError
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml import EFFORTS, Wording, render
from perilune.tokenizer.xtml.messages import sorted_json

BYTE = ByteTokenizer()
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"parameters": {"type": "object", "b": [{"z": 1, "a": "é"}]}, "name": "weather"},
}
SORTED = '[{"function":{"name":"weather","parameters":{"b":[{"a":"é","z":1}],"type":"object"}},"type":"function"}]'
BARE = Wording(
    tools_declared="T {tools}", tools_added="A {tools}", thinking_effort="E {effort}", tool_choice_required="required",
    tool_choice_none="none", response_json_object="J", response_json_schema="S {schema}",
)  # fmt: skip


def messages_of(conversation=HI, **options):
    """(attributes, body) of every message of the prompt, the opened one last."""
    ids = render(BYTE, conversation, wording=BARE, **options).ids
    text = BYTE.decode(ids, skip_special=False)
    out = []
    for part in text.split("<|end_of_msg|>"):
        attributes, _, body = part.removeprefix("<|open|>message ").partition("<|sep|>")
        out.append((attributes, body.removesuffix("<|close|>message<|sep|>")))
    return out


def test_global_options_stand_first_and_one_shot_options_last():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "a": 1}}}
    shown = messages_of(tools=[WEATHER], effort="low", tool_choice="required", response_format=schema)
    assert shown == [
        ('role="system" type="tool-declare"', "T " + SORTED),
        ('role="system" type="thinking-effort"', "E low"),
        ('role="user"', "Hi"),
        ('role="system" type="tool-choice"', "required"),
        ('role="system" type="response-format"', 'S {"a":1,"type":"object"}'),
        ('role="assistant"', "<|open|>think<|sep|>"),
    ]


def test_added_tools_stand_where_their_message_stands():
    conversation = [*HI, {"role": "system", "tools": [WEATHER]}, {"role": "user", "content": "now"}]
    assert messages_of(conversation)[1:3] == [
        ('role="system" type="tool-declare"', "A " + SORTED),
        ('role="user"', "now"),
    ]
    added = {"type": "function", "function": {"name": "weather"}}
    assert len(messages_of(conversation, tool_choice={"type": "function", "function": added["function"]})) == 4


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({}, []),
        ({"tools": []}, []),
        ({"tools": [WEATHER], "tool_choice": "auto"}, ["tool-declare"]),
        ({"tools": [WEATHER], "tool_choice": "none"}, ["tool-declare", "tool-choice"]),
        ({"tool_choice": "none"}, ["tool-choice"]),
        # one named tool is for the grammar: the format has no message for it
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, ["tool-declare"]),
        ({"effort": "max"}, ["thinking-effort"]),
        ({"effort": "max", "thinking": False}, []),
        ({"response_format": {"type": "text"}}, []),
        ({"response_format": {"type": "json_object"}}, ["response-format"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, ["response-format"]),
    ],
)
def test_which_options_are_said(options, types):
    shown = [attributes for attributes, _ in messages_of(**options)]
    assert [a for a in shown if "type=" in a] == [f'role="system" type="{name}"' for name in types]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"effort": "medium"}, "'medium'; allowed: low, high, max; medium is reserved"),
        ({"effort": "medium", "thinking": False}, "'medium'"),
        ({"effort": ""}, "''; allowed: low, high, max"),
        ({"tool_choice": "required"}, "no tools are declared"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; allowed: auto, none, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "wether"}}}, "'wether', which is not declared; declared: weather"),
        ({"tools": {"a": 1}}, "tools is of type dict"),
        ({"tools": [{"type": "web"}]}, r"tools\[0\] is"),
        ({"tools": [WEATHER, {"type": "function"}]}, r"tools\[1\].function is missing"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, r"tools\[0\].function.name is of type int"),
        ({"tools": [{"function": {"name": "f", "x": float("nan")}}]}, "tools cannot be written as JSON"),
        ({"tools": [{"function": {"name": "f", "x": "\ud800"}}]}, "tools has the lone surrogate"),
        ({"response_format": "json_object"}, "response_format is json_object; give"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, r"response_format.json_schema.schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "schema is list"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options, match):
    with pytest.raises(RequestError, match=match):
        render(BYTE, HI, **options)


@given(value=json_values)
def test_json_is_compact_sorted_and_says_the_same(value):
    text = sorted_json(value, "x")
    assert json.loads(text) == value

    def keys_in_order(pairs):
        assert [key for key, _ in pairs] == sorted(key for key, _ in pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=keys_in_order)
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


@given(
    messages=message_lists(),
    tools=tools_lists,
    choice=st.sampled_from(["none", "required", "auto"]),
    shape=st.sampled_from([{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}]),
    effort=st.sampled_from([None, *EFFORTS]),
)
def test_history_survives_a_change_of_one_shot_options(messages, tools, choice, shape, effort):
    plain = render(BYTE, messages, tools=tools, effort=effort)
    other = render(BYTE, messages, tools=tools, effort=effort, tool_choice=choice, response_format=shape)
    kept = plain.message_ends[-1]
    assert plain.message_ends == other.message_ends and plain.ids[:kept] == other.ids[:kept]
    assert plain.ids[kept:] != other.ids[kept:]
    assert not any(other.loss_mask[kept:])


def test_options_are_not_messages_of_the_conversation():
    prompt = render(
        BYTE, HI, tools=[WEATHER], effort="high", tool_choice="none", response_format={"type": "json_object"}
    )
    assert len(prompt.message_ends) == 1 and not any(prompt.loss_mask)
    ends = [i + 1 for i, token_id in enumerate(prompt.ids) if token_id == BYTE.special.end_of_msg]
    assert prompt.message_ends == [ends[2]] and len(ends) == 5
