"""Nothing that a user, a tool or a schema says can become a control token, whatever it says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_lists import MARKER_TEXTS, count_images, json_values, message_lists, texts, tools_lists
from rank_files import small_rank_file

from perilune.tokenizer import ByteTokenizer, TiktokenTokenizer, train_bpe
from perilune.tokenizer.xtml import Marker, conversation_segments, encode_segments, render

# Vocabularies that have merges across everything a marker is made of, and markers as ordinary tokens.
NEAR = [*MARKER_TEXTS, "<|open|>message", "><|sep|>", "t<|close|>", 'role="user"<|sep|>', "<|end_of_msg|><|open|>"]
TOKENIZERS = [
    ByteTokenizer(),
    train_bpe(["\n".join(NEAR) + "message<|close|>message" * 20], 600),
    TiktokenTokenizer(small_rank_file(*NEAR)),
]
EACH = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "bpe", "ranks"])


def defused(value, path=""):
    """The same structure with harmless strings: only the parts of the format that are not text stay."""
    if isinstance(value, dict):
        return {
            key: item if key in ("role", "type", "tool_call_id", "id") else defused(item, key)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [defused(item, path) for item in value]
    if path == "arguments":
        try:
            arguments = json.loads(value)
        except ValueError:
            return "{" if value.strip() else "{}"
        return json.dumps({f"k{i}": 0 for i in range(len(arguments))})
    return "n"


def control_ids(tokenizer, ids):
    return [token_id for token_id in ids if token_id in tokenizer.special]


@EACH
@given(data=st.data())
def test_control_ids_do_not_depend_on_any_text(tokenizer, data):
    messages = data.draw(message_lists(images=True, invalid_json=True))
    tools, schema = data.draw(tools_lists), data.draw(json_values)
    thinking = data.draw(st.booleans())
    sizes = [(1, 1, 1)] * count_images(messages)

    def ids(conversation, declared, wanted):
        shape = {"type": "json_schema", "json_schema": {"schema": {"a": wanted}}}
        return render(
            tokenizer, conversation, tools=declared, thinking=thinking, tool_choice="required", response_format=shape, images=sizes
        ).ids  # fmt: skip

    hostile = ids(messages, tools, schema)
    harmless = ids(defused(messages), [{"type": "function", "function": {"name": "n"}}], 0)
    assert control_ids(tokenizer, hostile) == control_ids(tokenizer, harmless)


@EACH
@given(messages=message_lists(invalid_json=True))
def test_ids_decode_to_the_text_with_markers_exactly_where_they_are(tokenizer, messages):
    """Oracle: the segments themselves; between two markers stands exactly the text that was put there."""
    segments = conversation_segments(messages)
    runs, expected = [b""], [b""]
    for token_id in encode_segments(tokenizer, segments):
        if token_id in tokenizer.special:
            runs += [tokenizer.special.name(token_id).encode(), b""]
        else:
            runs[-1] += tokenizer.token_bytes(token_id)
    for segment in segments:
        if isinstance(segment, Marker):
            expected += [segment.name.encode(), b""]
        else:
            expected[-1] += segment.encode()
    assert runs == expected


@EACH
@given(text=texts)
def test_one_text_makes_no_control_id(tokenizer, text):
    assert control_ids(tokenizer, encode_segments(tokenizer, [text, "|>", "<|", text])) == []


@EACH
@pytest.mark.parametrize("name", ["<|open|>", "<|end_of_msg|>", "<|media_pad|>", "[EOS]", "<|kimi_image_placeholder|>"])
def test_a_spelled_marker_stays_text_everywhere(tokenizer, name):
    function = {"name": name, "description": name, "parameters": {name: [name]}}
    messages = [
        {"role": "system", "content": name, "name": name},
        {"role": "user", "content": [{"type": "text", "text": name}, {"type": "text", "text": f"{name}\n"}]},
        {
            "role": "assistant",
            "content": name,
            "reasoning": name,
            "tool_calls": [
                {"id": name, "function": {"name": name, "arguments": json.dumps({name: name, "o": {name: name}})}},
                {"function": {"name": name, "arguments": name}}
                if not name.startswith("[")
                else {"function": {"name": name}},
            ],
        },
        {"role": "tool", "tool_call_id": name, "content": name},
        {"role": "system", "tools": [{"type": "function", "function": function}]},
    ]
    tools = [{"type": "function", "function": function}]
    segments = conversation_segments(messages, tools=tools, tool_choice="required")
    markers = [tokenizer.special.ids[s.name] for s in segments if isinstance(s, Marker)]
    prompt = render(tokenizer, messages, tools=tools, tool_choice="required")
    assert control_ids(tokenizer, prompt.ids) == markers and prompt.media == []
