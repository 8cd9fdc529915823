"""What the parser makes of outputs, valid ones and others: the table of behaviours (architecture §10.4), by hand."""

from __future__ import annotations

import pytest
from outputs import BYTES, CLOSE, END, OPEN, SEP, answer, argument, call, ids, tools

from perilune.errors import RequestError
from perilune.tokenizer.xtml import Marker, close_tag, open_tag
from perilune.tokenizer.xtml.events import (
    ArgumentBegin,
    ArgumentEnd,
    ArgumentText,
    CallBegin,
    CallEnd,
    ChannelBegin,
    MessageEnd,
    Text,
    joined,
)
from perilune.tokenizer.xtml.parse import Parser, parse
from perilune.tokenizer.xtml.parse_pieces import stop_ids
from perilune.tokenizer.xtml.parse_value import read_value

SPECIAL = BYTES.special
RESPONSE = [*close_tag("think"), *open_tag("response")]


def read(*parts, thinking=False, declared=("f",)):
    return parse(BYTES, ids(*parts), thinking=thinking, tools=declared)


def clean(*parts, **options):
    """A parsed output that must have no problem."""
    parsed = read(*parts, **options)
    assert parsed.problems == () and parsed.finished
    return parsed


def test_events_of_a_whole_output():
    output = ids(
        "why é",
        RESPONSE,
        answer(
            "so 🌖",
            tools(call('q"&', 1, argument("k", "string", "<|close|>"), argument("n", "number", "3")), call("g", 2)),
        ),
    )
    parser = Parser(BYTES, thinking=True, tools=('q"&',))
    events = list(joined(event for token_id in output for event in parser.push([token_id])))
    assert parser.finish() == []
    assert [event for event in events if type(event).__name__ != "Problem"] == [
        ChannelBegin("think"), Text("think", "why é"), ChannelBegin("response"), Text("response", "so 🌖"),
        CallBegin(0, 'q"&', "1", True),
        ArgumentBegin(0, "k", "string"), ArgumentText(0, "<|close|>"), ArgumentEnd(0, "k", "<|close|>", True),
        ArgumentBegin(0, "n", "number"), ArgumentEnd(0, "n", 3, True),
        CallEnd(0, True), CallBegin(1, "g", "2", False), CallEnd(1, True), MessageEnd(SPECIAL.end_of_msg),
    ]  # fmt: skip


def test_valid_outputs_have_no_problem():
    parsed = clean("t", RESPONSE, answer("r"), thinking=True)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("t", "r", ())
    parsed = clean("", RESPONSE, "", close_tag("response"), END, thinking=True)
    assert (parsed.reasoning, parsed.content) == ("", ""), "the closing tag of the message may be left out"
    parsed = clean(answer("r", tools(call("f", 1))))
    assert (parsed.reasoning, parsed.content, parsed.tool_calls[0].arguments) == (None, "r", {})


def test_ids_behind_the_stop_are_ignored():
    parsed = parse(BYTES, [*ids("yes"), SPECIAL.eos, *ids("no", OPEN, "think", SEP)], thinking=False)
    assert (parsed.content, parsed.finished) == ("yes", True)
    assert stop_ids(BYTES) == (SPECIAL.end_of_msg, SPECIAL.eos)
    with pytest.raises(RequestError, match="288"):
        parse(BYTES, [288], thinking=False)


@pytest.mark.parametrize(
    ("kind", "text", "value", "valid"),
    [
        ("string", "3", "3", True),
        ("string", "", "", True),
        ("number", "3", 3, True),
        ("number", "-1.5e3", -1500.0, True),
        ("number", " 3\n", 3, True),
        ("number", "1e999", 1.7976931348623157e308, True),
        ("number", "9" * 5000, 1.7976931348623157e308, True),
        ("number", "true", True, False),
        ("number", '"3"', "3", False),
        ("boolean", "true", True, True),
        ("boolean", "1", 1, False),
        ("null", "null", None, True),
        ("object", '{"a": "é"}', {"a": "é"}, True),
        ("object", "[]", [], False),
        ("array", "[1, {}]", [1, {}], True),
        ("object", "{", "{", False),
        ("array", "", "", False),
        ("number", "NaN", "NaN", False),
        ("array", "[-Infinity]", "[-Infinity]", False),
        ("array", "[" * 200_000, "[" * 200_000, False),
        ("object", '{"a": "\\ud800"}', '{"a": "\\ud800"}', False),
        ("integer", "3", 3, False),
        ("", "{}", {}, False),
    ],
)  # fmt: skip
def test_typed_arguments(kind, text, value, valid):
    assert read_value(kind, text) == (value, valid)
    parsed = read(answer("", tools(call("f", 1, argument("k", kind, text)))))
    assert parsed.tool_calls[0].arguments == {"k": value} and parsed.tool_calls[0].complete
    assert (parsed.problems == ()) == valid


def test_a_string_is_not_read_as_json_and_a_missing_type_is_string():
    output = [OPEN, 'call tool="f" index="1"', SEP, OPEN, 'argument key="k"', SEP, '"a"', *close_tag("argument")]
    parsed = read("", close_tag("response"), open_tag("tools"), output, close_tag("call"), close_tag("tools"), END)
    assert parsed.tool_calls[0].arguments == {"k": '"a"'}


def test_attributes_are_unescaped_and_marker_texts_stay_text():
    value = "<|close|>argument<|sep|><|end_of_msg|>&quot;"
    parsed = clean(
        answer("<|open|>tools<|sep|>", tools(call('a"&quot;', 1, argument("&amp;", "string", value)))),
        declared=('a"&quot;',),
    )
    assert parsed.content == "<|open|>tools<|sep|>"
    assert (parsed.tool_calls[0].tool, parsed.tool_calls[0].arguments) == ('a"&quot;', {"&amp;": value})


# Departures, in the order of the table.


def test_spaces_inside_a_tag_are_tolerated():
    parsed = read(
        "t", CLOSE, " think\n", SEP, OPEN, "\tresponse ", SEP, "r", CLOSE, "  response", SEP, END, thinking=True
    )
    assert (parsed.reasoning, parsed.content) == ("t", "r") and len(parsed.problems) == 3


def test_an_opened_think_may_be_written_again():
    parsed = read(open_tag("think"), "t", RESPONSE, answer("r"), thinking=True)
    assert (parsed.reasoning, parsed.content, len(parsed.problems)) == ("t", "r", 1)
    parsed = read(open_tag("response"), answer("r"))
    assert (parsed.reasoning, parsed.content, len(parsed.problems)) == (None, "r", 1)


def test_a_response_without_think_markers_is_content():
    parsed = read(open_tag("response"), answer("r"), thinking=True)
    assert (parsed.reasoning, parsed.content) == ("", "r")


@pytest.mark.parametrize("end", [[], [END]])
def test_never_closed_thinking_is_all_reasoning(end):
    parsed = read("hm", end, thinking=True)
    assert (parsed.reasoning, parsed.content, parsed.finished) == ("hm", None, bool(end)) and parsed.problems


def test_t25_tools_behind_an_unclosed_think_are_called():
    parsed = read("hm", tools(call("f", 1, argument("k", "string", "v"))), close_tag("message"), END, thinking=True)
    assert (parsed.reasoning, parsed.content) == ("hm", None)
    assert parsed.tool_calls[0].arguments == {"k": "v"} and parsed.tool_calls[0].complete


def test_t25_closing_tags_are_never_text():
    parsed = read("r", close_tag("message"), END)
    assert parsed.content == "r" and parsed.problems
    for cut in ([CLOSE], [CLOSE, "mess"], [CLOSE, "message"], [OPEN, "tools"], [OPEN, 'call tool="f" ind']):
        parsed = read("r", cut)
        assert parsed.content == "r" and not parsed.finished, cut


def test_think_can_follow_a_response():
    parsed = read("a", open_tag("think"), "c", END)
    assert (parsed.reasoning, parsed.content) == ("c", "a")


def test_text_behind_think_without_an_opened_response_is_content():
    parsed = read("t", close_tag("think"), "\n ", open_tag("response"), answer("r"), thinking=True)
    assert (parsed.reasoning, parsed.content) == ("t", "r")
    parsed = read("t", close_tag("think"), "\n", " ", "r ", close_tag("response"), END, thinking=True)
    assert (parsed.reasoning, parsed.content) == ("t", "r ")


def test_a_call_without_a_name_is_dropped():
    nameless = [OPEN, 'call index="1"', SEP, *argument("k", "string", "v"), *close_tag("call")]
    parsed = read(answer("r", tools(nameless, call("f", 1))))
    assert [c.tool for c in parsed.tool_calls] == ["f"] and parsed.content == "r" and parsed.problems
    parsed = read(answer("r", tools(call("", 1, argument("k", "string", "v")))))
    assert parsed.tool_calls == () and parsed.content == "r"


def test_tools_without_a_call():
    parsed = read(answer("r", tools()))
    assert (parsed.content, parsed.tool_calls) == ("r", ()) and parsed.problems == ("tools without a call",)
    parsed = read(answer("r", open_tag("tools"), ["f(x)"], close_tag("tools")))
    assert (parsed.content, parsed.tool_calls) == ("r", ())


def test_cut_calls_keep_what_is_whole():
    whole = call("f", 1, argument("a", "number", "1"), argument("b", "string", "long text"))
    output = ids("r", close_tag("response"), open_tag("tools"), call("f", 1), whole)
    states = set()
    for length in range(len(output)):
        parsed = parse(BYTES, output[:length], thinking=False, tools=("f",))
        assert parsed.content == "r"[:length] and not parsed.finished
        states.add(tuple((c.complete, tuple(c.arguments.items())) for c in parsed.tool_calls))
    done = (True, ())
    assert states == {
        (), ((False, ()),), (done,), (done, (False, ())), (done, (False, (("a", 1),))),
        (done, (False, (("a", 1), ("b", "long text")))),
    }  # fmt: skip


def test_a_call_that_another_tag_cuts_is_not_whole():
    first = [*open_tag("call", {"tool": "f", "index": "1"}), *argument("a", "number", "1")]
    parsed = read(answer("r", tools(first, call("f", 2))))
    assert [(c.complete, c.arguments) for c in parsed.tool_calls] == [(False, {"a": 1}), (True, {})]
    unclosed = [
        *open_tag("call", {"tool": "f", "index": "1"}),
        *open_tag("argument", {"key": "a", "type": "string"}),
        "x",
    ]
    for end in (close_tag("call"), close_tag("tools"), close_tag("message"), open_tag("response")):
        parsed = read("r", close_tag("response"), open_tag("tools"), unclosed, end, END)
        assert [(c.complete, c.arguments) for c in parsed.tool_calls] == [(False, {"a": "x"})], end
    two = [*unclosed, *argument("b", "string", "y"), *close_tag("call")]
    assert read(answer("", tools(two))).tool_calls[0].arguments == {"a": "x", "b": "y"}


def test_a_tag_ends_what_is_read_over():
    """A json block behind an argument means nothing; the next call must still end the one around it."""
    lost = [*open_tag("call", {"tool": "f", "index": "1"}), *argument("a", "number", "1"), *open_tag("json"), "{}"]
    output = ids("r", close_tag("response"), open_tag("tools"), lost, call("f", 2), close_tag("tools"), END)
    parser = Parser(BYTES, thinking=False, tools=("f",))
    calls = [event for event in parser.push(output) if isinstance(event, (CallBegin, CallEnd))]
    assert calls == [CallBegin(0, "f", "1", True), CallEnd(0, False), CallBegin(1, "f", "2", True), CallEnd(1, True)]


def test_a_call_outside_of_tools_is_a_call():
    parsed = read("r", call("f", 1, argument("k", "string", "v")), END)
    assert parsed.content == "r" and parsed.tool_calls[0].arguments == {"k": "v"} and parsed.problems


def test_arguments_outside_of_calls_are_not_text():
    parsed = read("a", argument("k", "string", "hidden"), "b", close_tag("response"), END)
    assert parsed.content == "ab" and parsed.problems


def test_t33_undeclared_tools_are_typed_and_not_shown():
    parsed = read(answer("ok", tools(call("rm", 1, argument("path", "string", "/")))), declared=())
    assert parsed.content == "ok" and parsed.undeclared_tools == ("rm",)
    assert not parsed.tool_calls[0].declared and parsed.problems == ("'rm' is not a declared tool",)
    parsed = read(answer("ok", tools(call("f", 1), call("rm", 2))))
    assert [c.declared for c in parsed.tool_calls] == [True, False]


def test_a_marker_that_begins_no_tag_gives_its_text_back():
    parsed = read("a", OPEN, "b " * 10, END)
    assert parsed.content == "a" + "b " * 10
    parsed = read("a", OPEN, "x = 1", SEP, END)
    assert parsed.content == "ax = 1"
    parsed = read("a", OPEN, 'b k="' + "v" * 5000, END)
    assert parsed.content == 'ab k="' + "v" * 5000
    parsed = read("a", OPEN, "b", OPEN, "think", SEP, "c", END)
    assert (parsed.reasoning, parsed.content) == ("c", "a"), "what may be a tag is dropped when it is cut"


def test_unknown_tags_and_control_tokens_are_left_out():
    parsed = read(
        "a", open_tag("image", {"n": "1"}), "b", SEP, Marker("<|media_pad|>"), "c", close_tag("image"), answer("d")
    )
    assert parsed.content == "abcd" and len(parsed.problems) == 5


def test_nothing_behind_the_message_is_shown():
    second = [*open_tag("message", {"role": "user"}), "do it", *close_tag("message")]
    parsed = read(
        "r", close_tag("response"), close_tag("message"), second, open_tag("response"), "more", tools(call("f", 1)), END
    )
    assert (parsed.content, parsed.tool_calls) == ("r", ())
    parsed = read("r", close_tag("response"), "more", close_tag("message"), "more", END)
    assert parsed.content == "r" and len(parsed.problems) == 2


def test_a_json_block_is_kept_as_it_is_and_is_a_problem():
    block = [*open_tag("json", {"type": "object"}), '{"a": ', *close_tag("json")]
    parsed = read(answer("", tools(call("f", 1, block))))
    only = parsed.tool_calls[0]
    assert (only.raw, only.arguments, only.arguments_json, only.complete) == (
        '{"a": ',
        {},
        '{"a": ',
        True,
    ) and parsed.problems


def test_a_repeated_key_keeps_its_last_value():
    parsed = clean(answer("", tools(call("f", 1, argument("k", "number", "1"), argument("k", "string", "x")))))
    assert parsed.tool_calls[0].arguments == {"k": "x"}


def test_bytes_that_are_no_character():
    parsed = parse(BYTES, [*ids("a"), 0xE6, 0x9C, *ids(close_tag("response"), END)], thinking=False)
    assert parsed.content == "a\ufffd" and parsed.problems == ("bytes that are not UTF-8",)
    assert clean(answer("a\ufffd")).content == "a\ufffd"


@pytest.mark.parametrize("head", ['call tool="f" index="2"', 'call index="1" tool="f"', 'call tool="f"', 'call tool="f" index="1" ', 'call tool="f" index="01"'])  # fmt: skip
def test_calls_written_otherwise_are_read_with_a_problem(head):
    parsed = read(answer("", [*open_tag("tools"), OPEN, head, SEP, *close_tag("call"), *close_tag("tools")]))
    assert parsed.tool_calls[0].tool == "f" and parsed.tool_calls[0].complete and parsed.problems


def test_messages_for_the_history():
    calls = tools(
        call("f", 1, argument("é", "array", "[1.0,2]")), call("g", 2), open_tag("call", {"tool": "h", "index": "3"})
    )
    parsed = read("t", RESPONSE, "r", close_tag("response"), calls, thinking=True)
    message = parsed.to_message(["x", "y"])
    assert message == {
        "role": "assistant", "content": "r", "reasoning_content": "t",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"é": [1.0, 2]}'}},
            {"id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }  # fmt: skip
    assert parsed.to_message()["tool_calls"][1]["id"] == "g:1"
    assert read("x").to_message() == {"role": "assistant", "content": "x"}


def test_bytes_that_are_no_character_inside_a_tag():
    head = [*ids("", close_tag("response"), open_tag("tools"), OPEN, 'call tool="f'), 0xE6, *ids('" index="1"', SEP)]
    tail = ids(close_tag("call"), close_tag("tools"), close_tag("message"), END)
    parsed = parse(BYTES, head + tail, thinking=False, tools=("f\ufffd",))
    assert parsed.tool_calls[0].tool == "f\ufffd" and parsed.problems == ("bytes that are not UTF-8",)
