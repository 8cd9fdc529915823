"""The chat format, against the id vectors of the published renderer (architecture §10.2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.chat import (
    Delta,
    Marker,
    ResponseParser,
    chat_segments,
    encode_segments,
    parse_response,
    render_chat,
    stop_ids,
)

TOKENIZER = ByteTokenizer()
SPECIAL = TOKENIZER.special
K3_IDS = {
    "message": 2778, " role": 6244, '="': 878, '"': 1, "user": 2482, "assistant": 69702, "think": 39964, "response": 12092,
    "Hi": 18699, "<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589, "<|end_of_msg|>": 163586,
}  # fmt: skip
GOLDEN = [163587, 2778, 6244, 878, 2482, 1, 163589, 18699, 163588, 2778, 163589, 163586,
          163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589]  # fmt: skip


def k3_ids(segments):
    return [K3_IDS[segment.name if isinstance(segment, Marker) else segment] for segment in segments]


def output(*parts):
    return encode_segments(TOKENIZER, parts)


OPEN, CLOSE, SEP, END = (Marker(name) for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))


def test_golden_vectors_of_the_published_renderer():
    hi = [{"role": "user", "content": "Hi"}]
    assert k3_ids(chat_segments(hi, thinking=True)) == GOLDEN
    assert k3_ids(chat_segments(hi, thinking=False)) == [*GOLDEN[:-2], 12092, 163589]
    assert k3_ids(chat_segments(hi, thinking=True, add_generation_prompt=False)) == GOLDEN[:12]


def test_thinking_history_is_kept_or_dropped_by_mode():
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "r"}]
    kept = TOKENIZER.decode(render_chat(TOKENIZER, history, thinking=True), skip_special=False)
    assert "<|open|>think<|sep|>r<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>" in kept
    assert kept.endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    dropped = TOKENIZER.decode(render_chat(TOKENIZER, history, thinking=False), skip_special=False)
    assert "think" not in dropped and dropped.endswith("<|open|>response<|sep|>")
    bare = [*history[:1], {"role": "assistant", "content": "b"}]
    assert "<|open|>think<|sep|><|close|>think" in TOKENIZER.decode(
        render_chat(TOKENIZER, bare, thinking=True), skip_special=False
    )


@settings(deadline=None, max_examples=50)
@given(
    contents=st.lists(st.sampled_from(["", "x", "<|end_of_msg|>", '"&', "é\n"]), min_size=2, max_size=6),
    thinking=st.booleans(),
)
def test_t30_a_longer_history_extends_the_shorter_prompt(contents, thinking):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text, "reasoning": "r"} for i, text in enumerate(contents)
    ]
    rendered = [
        render_chat(TOKENIZER, messages[:n], thinking=thinking, add_generation_prompt=False)
        for n in range(1, len(messages) + 1)
    ]
    for shorter, longer in zip(rendered, rendered[1:]):
        assert longer[: len(shorter)] == shorter
    assert rendered[-1].count(SPECIAL.end_of_msg) == len(messages), "message text made a control id"


def test_attributes_are_escaped_and_bodies_are_not():
    text = TOKENIZER.decode(
        render_chat(TOKENIZER, [{"role": "user", "name": 'a"&', "content": 'b"&'}], thinking=False), skip_special=False
    )
    assert text.startswith('<|open|>message role="user" name="a&quot;&amp;"<|sep|>b"&<|close|>')


def test_content_parts_join_without_separator():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(TOKENIZER, [{"role": "user", "content": parts}], thinking=False) == render_chat(
        TOKENIZER, [{"role": "user", "content": "ab"}], thinking=False
    )


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "empty"),
        ([{"role": "developer", "content": "x"}], "developer"),
        ([{"role": "user"}], r"messages\[0\].content is NoneType"),
        ([{"role": "user", "content": [{"type": "image"}]}], "not text"),
    ],
)
def test_malformed_messages_are_refused(messages, match):
    with pytest.raises(RequestError, match=match):
        render_chat(TOKENIZER, messages, thinking=True)


def test_parser_splits_the_channels_and_streams_them():
    ids = output(
        "why é", CLOSE, "think", SEP, OPEN, "response", SEP, "so 🌖", CLOSE, "response", SEP, CLOSE, "message", SEP, END
    )
    parser = ResponseParser(TOKENIZER, thinking=True)
    deltas = [delta for token_id in ids for delta in parser.push(token_id)]
    last, response = parser.finish()
    assert last == [] and response.finished and not response.undeclared_tools
    assert (response.reasoning, response.content) == ("why é", "so 🌖")
    for channel, text in (("think", "why é"), ("response", "so 🌖")):
        assert "".join(delta.text for delta in deltas if delta.channel == channel) == text
    assert Delta("response", "🌖") in deltas


def test_rendered_assistant_turn_parses_back_to_itself():
    prompt = [{"role": "user", "content": "q"}]
    turn = {"role": "assistant", "content": "a <|close|> b", "reasoning_content": "t"}
    before = render_chat(TOKENIZER, prompt, thinking=True)
    whole = render_chat(TOKENIZER, [*prompt, turn], thinking=True, add_generation_prompt=False)
    response = parse_response(TOKENIZER, whole[len(before) :], thinking=True)
    assert (response.reasoning, response.content, response.finished) == ("t", "a <|close|> b", True)


def test_never_closed_thinking_is_all_reasoning():
    response = parse_response(TOKENIZER, output("hm", OPEN, "resp"), thinking=True)
    assert (response.reasoning, response.content, response.finished) == ("hm", None, False)


def test_no_thinking_everything_is_content_and_stops_are_obeyed():
    response = parse_response(TOKENIZER, [*output("yes"), SPECIAL.eos, *output("no")], thinking=False)
    assert (response.reasoning, response.content, response.finished) == (None, "yes", True)
    assert stop_ids(TOKENIZER) == (SPECIAL.end_of_msg, SPECIAL.eos)


def test_t33_undeclared_tools_are_typed_and_not_shown():
    ids = output(
        "ok",
        CLOSE,
        "response",
        SEP,
        OPEN,
        "tools",
        SEP,
        OPEN,
        'call tool="rm" index="1"',
        SEP,
        "x",
        CLOSE,
        "call",
        SEP,
        END,
    )
    response = parse_response(TOKENIZER, ids, thinking=False)
    assert response.content == "ok" and response.undeclared_tools


def test_a_marker_without_an_end_gives_its_text_back():
    response = parse_response(TOKENIZER, output("a", OPEN, "b" * 100, END), thinking=False)
    assert response.content == "a" + "b" * 100
    response = parse_response(TOKENIZER, output("a", OPEN, "b", OPEN, "think", SEP, "c", END), thinking=False)
    assert (response.reasoning, response.content) == ("c", "ab")
