"""Pieces of tool calls joined are JSON, whatever the pieces; and what is shown of an answer in which order."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from perilune.serve.calls import CallWriter
from perilune.serve.reader import ChatReader, Piece
from perilune.serve.request import CallDelta
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml import Marker, close_tag, encode_segments, open_tag, render
from perilune.tokenizer.xtml.parse import Parser, parse

TOKENIZER = ByteTokenizer()
END = Marker("<|end_of_msg|>")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def drawn(message, **options):
    """What a model would have drawn to say `message`."""
    opened = encode_segments(TOKENIZER, [*open_tag("message", {"role": "assistant"}), *open_tag("response")])
    return render(TOKENIZER, [message], thinking=False, add_generation_prompt=False).ids[len(opened) :]


def calling(*calls, content=""):
    functions = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def reader(**options):
    return ChatReader(TOKENIZER, options.pop("stops", ()), thinking=False, tools=("f",), **options)


@given(st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), min_size=1, max_size=3))
def test_pieces_of_each_call_are_one_json_object(arguments):
    ids = drawn(calling(*(("f", value) for value in arguments)))
    writer, parser, pieces = CallWriter(), Parser(TOKENIZER, thinking=False, tools=("f",)), {}
    for token_id in ids:
        for event in parser.push([token_id]):
            delta = writer.write(event)
            if delta is not None:
                first = delta.position not in pieces
                assert (delta.id is not None) == (delta.name is not None) == first
                pieces.setdefault(delta.position, []).append(delta.arguments)
    assert ["".join(pieces[position]) for position in range(len(arguments))] == [
        json.dumps(a, ensure_ascii=False) for a in arguments
    ]
    assert len({call.id for call in writer.calls}) == len(arguments) and all(call.ended for call in writer.calls)
    parsed = parse(TOKENIZER, ids, thinking=False, tools=("f",))
    assert [call.arguments for call in writer.calls] == [call.arguments_json for call in parsed.tool_calls]


def test_a_cut_call_stays_cut():
    ids = drawn(calling(("f", {"a": "first", "b": "second"})))
    cut = len(ids) - len(encode_segments(TOKENIZER, [*close_tag("argument"), *close_tag("call"), *close_tag("tools"), *close_tag("message"), END]))  # fmt: skip
    half = reader()
    for token_id in ids[: cut - 2]:
        half.push(token_id)
    half.finish()
    assert not half.called
    assert half.message()["tool_calls"][0]["function"]["arguments"] == '{"a": "first", "b": "seco'


def test_an_argument_arrives_piece_by_piece():
    one = reader()
    taken = [one.push(token_id) for token_id in drawn(calling(("f", {"text": 'a"\n🌖'})))]
    pieces = [piece.calls[0].arguments for piece in taken if piece.calls]
    assert pieces == ["", '{"text": "', "a", '\\"', "\\n", "🌖", '"', "}"]


def test_calls_are_hidden_where_nobody_asked_for_them():
    ids = drawn(calling(("f", {"a": 1}), content="hi"))
    for show in (True, False):
        one = reader(show_calls=show)
        pieces = [one.push(token_id) for token_id in ids] + [one.finish()]
        assert "".join(piece.text for piece in pieces) == one.text == "hi"
        assert any(piece.calls for piece in pieces) == one.called == show
        assert ("tool_calls" in one.message()) == show


def test_a_json_block_is_passed_on_as_it_is():
    ids = drawn(
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}
    )
    one = reader()
    for token_id in ids:
        one.push(token_id)
    assert one.message()["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_pieces_add_up():
    first = Piece("a", "b", (CallDelta(0, "x", "id", "f"), CallDelta(1, "y", "jd", "g")))
    both = first + Piece("c", "d", (CallDelta(1, "z"),))
    assert both == Piece("ac", "bd", (CallDelta(0, "x", "id", "f"), CallDelta(1, "yz", "jd", "g")))
    assert first and not Piece() and Piece(calls=first.calls)


def test_t59_stop_strings_end_the_response_and_touch_neither_reasoning_nor_arguments():
    thought = [*close_tag("think"), *open_tag("response")]
    call = [*open_tag("tools"), *open_tag("call", {"tool": "f", "index": "1"}), *open_tag("argument", {"key": "k", "type": "string"}), "STOP", *close_tag("argument"), *close_tag("call"), *close_tag("tools")]  # fmt: skip
    for text, expected in (("well", "well"), ("wellSTOPmore", "well")):
        one = ChatReader(TOKENIZER, ("STOP",), thinking=True, tools=("f",))
        ids = encode_segments(
            TOKENIZER, ["a STOP b", *thought, text, *close_tag("response"), *call, *close_tag("message"), END]
        )
        for token_id in ids:
            if not one.stopped:
                one.push(token_id)
        assert (one.reasoning, one.text, one.stopped) == ("a STOP b", expected, text != expected)
        assert one.called == (text == expected)
