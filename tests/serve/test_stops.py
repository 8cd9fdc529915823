"""Stop strings: the streamed text equals a search over the whole text, however it is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.serve.stops import StopMatcher


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut before the stop string that ends first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_any_split_gives_the_text_before_the_first_stop(pieces, stops):
    matcher = StopMatcher(stops)
    out = ""
    whole, stopped = oracle("".join(pieces), stops)
    for piece in pieces:
        out += matcher.push(piece)
        assert whole.startswith(out), "text left that belongs to a stop string"
    assert matcher.stopped == stopped
    assert out + matcher.finish() == whole


def test_the_first_stop_to_end_wins_and_then_the_longer():
    for stops in (["d", "bcd", "c"], ["c", "d", "bcd"]):
        matcher = StopMatcher(stops)
        assert matcher.push("abcd") == "ab" and matcher.stopped
    matcher = StopMatcher(["d", "bcd", "cd"])
    assert matcher.push("abcd") == "a" and matcher.stopped


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["\n\ndef"])
    assert matcher.push("x = 1\n") == "x = 1"
    assert matcher.push("y") == "\ny"
    assert matcher.push("\n\nde") == ""
    assert matcher.push("l") == "\n\ndel"
    assert matcher.push("\n\ndef f") == ""
    assert matcher.stopped and matcher.push("more") == "" and matcher.finish() == ""


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_without_a_match_everything_passes(stops):
    matcher = StopMatcher(stops)
    assert "".join(matcher.push(c) for c in "abcz") + matcher.finish() == "abcz"
