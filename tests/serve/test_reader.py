"""Readers: log-probabilities leave with their text, whatever is held back; ids are all told; stop strings may be shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.serve.reader import ChatReader, Piece, TextReader
from perilune.serve.request import TokenLogprob
from perilune.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
SPECIAL = TOKENIZER.special


def run(reader, ids) -> Piece:
    """All pieces joined; each token's logprob is minus its place."""
    whole = Piece()
    for place, token_id in enumerate(ids):
        whole += reader.push(token_id, TokenLogprob(token_id, -float(place)))
        assert len(whole.logprobs) >= 0 and all(one.offset < len(whole.text) for one in whole.logprobs)
        if reader.stopped:
            break
    return whole + reader.finish()


def text_of(piece: Piece) -> str:
    return TOKENIZER.decode([one.token_id for one in piece.logprobs])


@given(st.text("abé\n€", max_size=20), st.lists(st.text("ab\n€", min_size=1, max_size=3), max_size=2))
def test_logprobs_of_a_text_spell_it(text, stops):
    ids = TOKENIZER.encode(text)
    whole = run(TextReader(TOKENIZER, stops), ids)
    assert text_of(whole) == whole.text
    assert [one.logprob for one in whole.logprobs] == [-float(place) for place in range(len(whole.logprobs))]
    assert list(whole.token_ids) == ids[: len(whole.token_ids)]
    if not stops:
        assert whole.text == text and list(whole.token_ids) == ids
        assert [one.offset for one in whole.logprobs] == [
            place for place, char in enumerate(text) for _ in char.encode()
        ]


def tag(kind: int, name: str) -> list[int]:
    return [kind, *TOKENIZER.encode(name), SPECIAL.sep]


def message(think: str, response: str) -> list[int]:
    close, begin = SPECIAL.close, SPECIAL.open
    return [
        *TOKENIZER.encode(think), *tag(close, "think"), *tag(begin, "response"), *TOKENIZER.encode(response),
        *tag(close, "response"), *tag(close, "message"), SPECIAL.end_of_msg,
    ]  # fmt: skip


def test_logprobs_of_a_chat_are_those_of_its_response():
    ids = message("let me see", "It is 4€.")
    reader = ChatReader(TOKENIZER, thinking=True)
    whole = run(reader, ids)
    assert (whole.reasoning, whole.text) == ("let me see", "It is 4€.")
    assert text_of(whole) == whole.text and list(whole.token_ids) == ids
    assert reader.reasoning_tokens == len("let me see") + len(tag(SPECIAL.close, "think"))


def test_t59_stop_strings_end_the_answer_not_the_reasoning():
    whole = run(ChatReader(TOKENIZER, ["see"], thinking=True), message("let me see", "we see it"))
    assert (whole.reasoning, whole.text) == ("let me see", "we ") and text_of(whole) == "we "


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_stop_string_can_be_shown(kind):
    ids = TOKENIZER.encode("one two three")
    reader = (
        TextReader(TOKENIZER, ["two"], include_stop=True)
        if kind == "text"
        else ChatReader(TOKENIZER, ["two"], include_stop=True, thinking=False)
    )
    whole = run(reader, ids)
    assert whole.text == "one two" == text_of(whole) and reader.stopped


def test_finishing_twice_adds_nothing():
    reader = TextReader(TOKENIZER, ["ab"])
    reader.push(ord("a"))
    assert reader.finish() == Piece("a", token_ids=(ord("a"),)) and not reader.finish()
