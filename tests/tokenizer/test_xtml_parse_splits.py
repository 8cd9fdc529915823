"""The parser under any input: nothing crashes, no marker is shown, and no split into pushes or ids changes anything."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import BYTES, answer, argument, bpe, call, ids, outputs, split_bytes, tools

from perilune.tokenizer.xtml import close_tag, open_tag
from perilune.tokenizer.xtml.events import (
    ArgumentBegin,
    ArgumentEnd,
    ArgumentText,
    CallBegin,
    CallEnd,
    Problem,
    Text,
    joined,
)
from perilune.tokenizer.xtml.parse import Parser, parse

DECLARED = ("f", 'q"&')


def events_of(output, pieces, *, tokenizer=BYTES, thinking=True):
    """Joined events of an output that arrives in pieces, cut behind the given positions."""
    parser = Parser(tokenizer, thinking=thinking, tools=DECLARED)
    events = []
    for start, end in pairwise([0, *sorted(pieces), len(output)]):
        events += parser.push(output[start:end])
    return list(joined([*events, *parser.finish()]))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_any_split_into_pushes_gives_the_same_events(count):
    """The fuzzer: rounds of 200 random outputs, other ones each time, for five minutes in full."""
    until = time.monotonic() + count(full=300, reduced=0)

    @settings(max_examples=200)
    @given(outputs, st.booleans(), st.lists(st.integers(0, 200), max_size=6))
    def any_split(output, thinking, cuts):
        whole = events_of(output, [], thinking=thinking)
        cuts = [min(cut, len(output)) for cut in cuts]
        assert events_of(output, cuts, thinking=thinking) == whole
        assert events_of(output, range(len(output)), thinking=thinking) == whole

    any_split()
    while time.monotonic() < until:
        any_split()


@given(outputs, st.booleans())
def test_every_event_order_makes_sense(output, thinking):
    """A consumer never meets text of a channel that is not open, or an argument outside of a call."""
    parser = Parser(BYTES, thinking=thinking, tools=DECLARED)
    begun, call, argument, ended = set(), None, None, set()
    events = [event for token_id in output for event in parser.push([token_id])] + parser.finish()
    assert type(events[-1]).__name__ == "MessageEnd" and not parser.push([65]) and not parser.finish()
    calls = 0
    for event in events:
        name = type(event).__name__
        if name == "ChannelBegin":
            assert event.channel not in begun
            begun.add(event.channel)
        elif isinstance(event, Text):
            assert event.channel in begun and event.text and call is None
        elif isinstance(event, CallBegin):
            assert event.call == calls and event.tool and call is None and event.declared == (event.tool in DECLARED)
            call, calls = event.call, calls + 1
        elif isinstance(event, ArgumentBegin):
            assert event.call == call and argument is None
            argument = (event.key, event.type, "")
        elif isinstance(event, ArgumentText):
            assert event.call == call and argument is not None and argument[1] == "string" and event.text
            argument = (*argument[:2], argument[2] + event.text)
        elif isinstance(event, ArgumentEnd):
            assert event.call == call and argument is not None and event.key == argument[0]
            if argument[1] == "string":
                assert event.value == argument[2] and event.valid
            json.dumps(event.value, allow_nan=False).encode()
            argument = None
        elif isinstance(event, CallEnd):
            assert event.call == call and argument is None
            call = None
            ended.add(event.call)
    assert len(ended) >= calls - 1, "only the last call can lack an end"


@given(outputs)
def test_visible_text_is_made_of_ordinary_ids_only(output):
    """Marker names are nowhere in the text that ordinary ids spell, so they must be nowhere in what is shown."""
    special = BYTES.special
    spelled = [token_id for token_id in output if token_id in special or token_id not in b"<[|"]
    parsed = parse(BYTES, spelled, thinking=True, tools=DECLARED)
    shown = [
        parsed.reasoning,
        parsed.content,
        *(text for c in parsed.tool_calls for text in (c.tool, c.arguments_json)),
    ]
    for text in shown:
        assert not any(name in (text or "") for name in special.ids), text


@given(outputs, st.booleans())
def test_how_bytes_are_cut_into_ids_changes_nothing(output, thinking):
    """The same output in merged ids: half characters, tags and values across id borders."""
    tokenizer = bpe()
    merged, run = [], bytearray()
    for token_id in [*output, None]:
        if token_id is not None and token_id not in BYTES.special:
            run += BYTES.token_bytes(token_id)
            continue
        merged += tokenizer.encode_bytes(bytes(run))
        run.clear()
        if token_id is not None:
            merged.append(tokenizer.special.ids.get(BYTES.special.name(token_id), tokenizer.special.pad))
    split = split_bytes(merged, tokenizer)
    whole = events_of(merged, [], tokenizer=tokenizer, thinking=thinking)
    assert events_of(split, [], tokenizer=tokenizer, thinking=thinking) == whole
    assert len(merged) <= len(split)


def test_every_split_of_a_long_output():
    output = ids(
        "tho🌖ught", close_tag("think"), open_tag("response"),
        answer("é月", tools(call("f", 1, argument("k", "string", "a🌖"), argument("n", "object", '{"é": 1}')), call('q"&', 2))),
    )  # fmt: skip
    whole = events_of(output, [])
    assert not any(isinstance(event, Problem) for event in whole)
    for cut in range(len(output) + 1):
        assert events_of(output, [cut]) == whole


def test_t60_a_long_string_argument_arrives_while_it_is_written():
    output = ids(answer("", tools(call("f", 1, argument("text", "string", "x" * 20_000)))))
    parser = Parser(BYTES, thinking=False, tools=("f",))
    pieces = [event.text for token_id in output for event in parser.push([token_id]) if isinstance(event, ArgumentText)]
    assert len(pieces) == 20_000 and set(pieces) == {"x"}
