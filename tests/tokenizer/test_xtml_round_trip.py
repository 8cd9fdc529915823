"""Rendered assistant messages parse back to themselves, and what was parsed renders to the same ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from message_lists import message_lists
from outputs import BYTES, bpe

from perilune.errors import RequestError
from perilune.tokenizer import SpecialTokens, Tokenizer
from perilune.tokenizer.xtml import encode_segments, open_tag, render
from perilune.tokenizer.xtml.parse import parse


def assistant_parts(tokenizer: Tokenizer, messages: list[dict[str, Any]], *, thinking: bool):
    """(message, ids of what the model would have drawn) of every assistant message."""
    rendered = render(tokenizer, messages, thinking=thinking, add_generation_prompt=False)
    opened = encode_segments(
        tokenizer, [*open_tag("message", {"role": "assistant"}), *open_tag("think" if thinking else "response")]
    )
    start = 0
    for message, end in zip(messages, rendered.message_ends, strict=True):
        part = rendered.ids[start:end]
        if message["role"] == "assistant":
            assert part[: len(opened)] == opened
            yield message, part[len(opened) :]
        start = end


def check(tokenizer: Tokenizer, messages: list[dict[str, Any]], *, thinking: bool, exact: bool) -> None:
    for message, drawn in assistant_parts(tokenizer, messages, thinking=thinking):
        calls = [call["function"] for call in message.get("tool_calls", [])]
        parsed = parse(tokenizer, drawn, thinking=thinking, tools={call["name"] for call in calls})
        reasoning = message.get("reasoning_content") or ""
        assert parsed.finished and parsed.content == message["content"]
        assert parsed.reasoning == ((reasoning if reasoning.strip() else "") if thinking else None)
        assert [call.tool for call in parsed.tool_calls] == [call["name"] for call in calls]
        if exact:
            assert parsed.problems == ()
            for got, sent in zip(parsed.tool_calls, calls):
                assert json.dumps(got.arguments) == json.dumps(json.loads(sent["arguments"]))
        again = render(tokenizer, [parsed.to_message()], thinking=thinking, add_generation_prompt=False)
        assert again.ids[-len(drawn) :] == drawn


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_messages_come_back(count):
    @settings(max_examples=count(full=20_000, reduced=60))
    @given(message_lists(), st.booleans())
    def messages_come_back(messages, thinking):
        check(BYTES, messages, thinking=thinking, exact=True)

    messages_come_back()


@given(message_lists(), st.booleans())
def test_messages_come_back_in_merged_ids(messages, thinking):
    check(bpe(), messages, thinking=thinking, exact=True)


@given(message_lists(invalid_json=True), st.booleans())
def test_arguments_that_are_no_json_come_back(messages, thinking):
    try:
        render(BYTES, messages, thinking=thinking)
    except RequestError:  # arguments that are JSON, but no object
        assume(False)
    check(BYTES, messages, thinking=thinking, exact=False)


class PublishedIds(Tokenizer):
    """The ids that the published vectors name (architecture §10.2), and no others."""

    words = {
        "message": 2778, " role": 6244, '="': 878, '"': 1, "user": 2482, "assistant": 69702, "think": 39964,
        "response": 12092, "tools": 25385, "call": 10257, "argument": 47185, "Hi": 18699,
    }  # fmt: skip
    vocab_size = 163_840
    special = SpecialTokens.of(
        [("[BOS]", 163_584), ("[EOS]", 163_585), ("<|end_of_msg|>", 163_586), ("<|open|>", 163_587),
         ("<|close|>", 163_588), ("<|sep|>", 163_589), ("[UNK]", 163_838), ("[PAD]", 163_839)]
    )  # fmt: skip
    fingerprint = "published"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.words[text]] for text in texts]

    def token_bytes(self, token_id: int) -> bytes:
        return {number: word.encode() for word, number in self.words.items()}[token_id]

    def byte_id(self, byte: int) -> int:
        raise NotImplementedError

    def save(self, path: Path) -> None:
        raise NotImplementedError


def test_published_ids():
    tokenizer = PublishedIds()
    prompt = [163587, 2778, 6244, 878, 2482, 1, 163589, 18699, 163588, 2778, 163589, 163586,
              163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589]  # fmt: skip
    drawn = [
        18699,
        163588,
        39964,
        163589,
        163587,
        12092,
        163589,
        18699,
        163588,
        12092,
        163589,
        163588,
        2778,
        163589,
        163586,
    ]
    parsed = parse(tokenizer, drawn, thinking=True)
    assert (parsed.reasoning, parsed.content, parsed.problems) == ("Hi", "Hi", ())
    history = [{"role": "user", "content": "Hi"}, parsed.to_message()]
    assert render(tokenizer, history, add_generation_prompt=False).ids == prompt + drawn
    parsed = parse(tokenizer, drawn[7:], thinking=False)
    assert (parsed.reasoning, parsed.content, parsed.problems) == (None, "Hi", ())
