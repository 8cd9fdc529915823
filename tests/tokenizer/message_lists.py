"""Random conversations for property tests of the chat format, as an OpenAI client would send them.

`message_lists()` draws valid lists of messages: what renders must parse back. Texts, names and argument keys are
adversarial: control tokens and tags spelled out, quotes, entities, half of a marker at an edge.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

MARKER_TEXTS = [
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "[BOS]", "[PAD]", "<osagent_mode>", "<|media_pad|>",
    "<|close|>response<|sep|>", "<|close|>message<|sep|><|end_of_msg|>", "<|open|>tools<|sep|>", "<|kimi_image_placeholder|>",
    "<|reserved_token_163700|>", "<|open|", "|>", "<|", "close|>",
]  # fmt: skip
PLAIN_TEXTS = [
    "", " ", "\n", "\r\n\t", "Hi", "hello world", "naïve café", "月は地球", "🌖\u200d🌗", "a\u0301", '"', "&", "&quot;", "&amp;quot;", "'",
    "{}", "[1, 2]", "null", "true", "1e5", "think", "response", "message", "\x00", "\u2028", "\\n", " role=", '="',
]  # fmt: skip

texts = st.lists(st.sampled_from(PLAIN_TEXTS + MARKER_TEXTS) | st.text(max_size=6), max_size=3).map("".join)
"""Any text of a message, a tool result or a string argument."""

names = st.sampled_from(["get_weather", "f", "a-b.c:0", 'q"&', "<|sep|>", "x y", "月", "tool"])
"""Names of tools and of speakers; never empty."""

keys = st.sampled_from(["city", "key", "", 'k"', "&amp;", "<|close|>", "a b", "clé", "type"])

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
"""Anything JSON can say."""

argument_dicts = st.dictionaries(keys, json_values, max_size=3)

invalid_arguments = st.sampled_from(["{", '{"a": }', "not json", '{"a": 1', "<|close|>json<|sep|>"]) | texts.filter(
    lambda t: not is_json(t)
)
"""Not JSON: what a cut-off model output leaves in `arguments`."""

reasonings = texts.map(lambda text: text if text.strip() else "")
"""Thinking; of white space alone the format keeps nothing."""

tools_lists = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": names, "description": texts, "parameters": st.dictionaries(keys, json_values, max_size=2)}
            ),
        }
    ),
    min_size=1,
    max_size=2,
)
"""Values of `tools`."""


def is_json(text: str) -> bool:
    """Whether a text is JSON, or has nothing but white space, which stands for no arguments."""
    try:
        json.loads(text)
    except ValueError:
        return not text.strip()
    return True


@st.composite
def assistant_messages(draw, *, tool_calls: bool = True, invalid_json: bool = False) -> dict[str, Any]:
    """One assistant message; `content` is always a string, and `arguments` is JSON text.

    `invalid_json` also draws arguments that are no JSON object: they render as a `json` block, which no output may have.
    """
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(reasonings)
    if tool_calls and draw(st.booleans()):
        message["tool_calls"] = [
            {
                "id": f"call_{draw(st.integers(0, 999))}_{position}",
                "type": "function",
                "function": {"name": draw(names), "arguments": draw(_arguments(invalid_json))},
            }
            for position in range(draw(st.integers(1, 3)))
        ]
    return message


def _arguments(invalid_json: bool) -> st.SearchStrategy[str]:
    valid = argument_dicts.map(lambda arguments: json.dumps(arguments, ensure_ascii=False))
    return valid | invalid_arguments if invalid_json else valid


@st.composite
def message_lists(
    draw, *, tool_calls: bool = True, invalid_json: bool = False, images: bool = False, dynamic_tools: bool = True
) -> list[dict[str, Any]]:
    """A conversation of 1 to 6 turns. Tool results follow their calls, sometimes in another order, some missing.

    `images` also draws image parts (`data:` URLs that no test opens); count them with `count_images`.
    """
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["system", "user", "user", "assistant", "assistant"]))
        if role == "assistant":
            message = draw(assistant_messages(tool_calls=tool_calls, invalid_json=invalid_json))
            messages.append(message)
            calls = draw(st.permutations(message.get("tool_calls", [])))
            for call in calls[: draw(st.integers(0, len(calls)))]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(_contents(images))})
            continue
        if role == "system" and dynamic_tools and draw(st.integers(0, 3)) == 0:
            messages.append({"role": "system", "tools": draw(tools_lists)})
            continue
        message = {"role": role, "content": draw(_contents(images and role == "user"))}
        if draw(st.integers(0, 3)) == 0:
            message["name"] = draw(names)
        messages.append(message)
    return messages


def _contents(images: bool) -> st.SearchStrategy[Any]:
    text_part = texts.map(lambda text: {"type": "text", "text": text})
    part = text_part | st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})
    return texts | st.lists(part if images else text_part, max_size=3)


def count_images(messages: list[dict[str, Any]]) -> int:
    """Image parts of a conversation, each of which needs a size to be rendered."""
    return sum(
        part.get("type") == "image_url"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
