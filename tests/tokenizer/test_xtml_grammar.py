"""The grammar of constrained decoding: it allows what the parser reads without a problem, and schemas are obeyed.

The oracle of schemas is the jsonschema library; that of the grammar is the parser, which shares no code with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import BYTES, CLOSE, END, OPEN, SEP, answer, argument, bpe, call, draw, ids, outputs, tools

from perilune.errors import RequestError
from perilune.tokenizer.xtml import close_tag, open_tag, render
from perilune.tokenizer.xtml.events import joined
from perilune.tokenizer.xtml.grammar import MOST_CALLS, answer_mask, needs_grammar
from perilune.tokenizer.xtml.parse import Parser, parse
from perilune.tokenizer.xtml.parse_value import TYPES

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F", 0, None]},
        "code": {"type": "string", "pattern": "^[A-Z]{2,3}\\d?$"},
        "where": {"$ref": "#/$defs/point"},
        "tags": {"anyOf": [{"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}, {"const": "none"}]},
    },
    "required": ["city", "unit", "where"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip
MAP = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "additionalProperties": {"type": ["number", "string"]},
}


def tool(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name} | ({"parameters": parameters} if parameters else {}) | more}


TOOLS = [tool("weather", WEATHER), tool('q"&', MAP), tool("now"), tool("free", strict=False)]
SCHEMAS = {"weather": WEATHER, 'q"&': MAP, "now": {"type": "object", "maxProperties": 0}, "free": {}}
FREE = [tool("f", strict=False), tool('q"&', strict=False)]
REQUESTS = [
    {"thinking": True},
    {"thinking": False, "tools": TOOLS},
    {"thinking": True, "tools": TOOLS, "tool_choice": "required"},
    {"thinking": False, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"thinking": False, "tools": TOOLS, "tool_choice": "required", "parallel": False},
    {"thinking": False, "tools": TOOLS, "tool_choice": "none"},
    {"thinking": False, "response_format": {"type": "json_object"}},
    {"thinking": True, "tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": WEATHER}}},
    {"thinking": False, "tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
]


@functools.cache
def any_call(tokenizer):
    """The grammar of a request that leaves the choice of tools open."""
    return answer_mask(tokenizer, thinking=False, tools=TOOLS)


def accepts(mask, output) -> bool:
    """Whether every id is allowed when its turn comes, and the answer is complete behind the last."""
    constraint = mask.start()
    for token_id in output:
        if constraint.is_end or not constraint.mask()[token_id]:
            return False
        constraint.advance(token_id)
    return constraint.is_end


def check_answer(output, request):
    """An output drawn from a request's grammar parses without a problem and keeps what the request promises."""
    parsed = parse(
        BYTES, output, thinking=request["thinking"], tools=[t["function"]["name"] for t in request.get("tools", ())]
    )
    assert parsed.problems == () and parsed.finished
    choice, calls = request.get("tool_choice", "auto"), parsed.tool_calls
    form = request.get("response_format")
    assert all(c.complete and c.declared and c.raw is None for c in calls)
    for called in calls:
        jsonschema.validate(called.arguments, SCHEMAS[called.tool])
    if choice == "none":
        assert not calls
    if choice == "required":
        assert calls
    if isinstance(choice, dict):
        assert [c.tool for c in calls] == ["weather"]
    if not request.get("parallel", True):
        assert len(calls) <= 1
    if form is not None and (parsed.content or not calls):
        value = json.loads(parsed.content)
        assert isinstance(value, dict)
        jsonschema.validate(value, WEATHER if form["type"] == "json_schema" else {})
    return parsed


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_drawn_answers_keep_their_promises(number, count):
    request = REQUESTS[number]
    mask = answer_mask(BYTES, **request)
    finished = 0
    for seed in range(count(full=2_000, reduced=25)):
        output = draw(mask.start(), seed)
        if output[-1] == BYTES.special.end_of_msg:
            check_answer(output, request)
            finished += 1
    assert finished > 15, "most random answers must end, or the test says little"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_split_of_drawn_answers(count):
    """The parser's events do not depend on how an answer arrives."""
    request = REQUESTS[2]
    mask = answer_mask(BYTES, **request)
    names = [t["function"]["name"] for t in TOOLS]
    for seed in range(count(full=200, reduced=6)):
        output = draw(mask.start(), seed, longest=600, ending=0.6)
        whole = Parser(BYTES, thinking=True, tools=names)
        events = list(joined([*whole.push(output), *whole.finish()]))
        for cut in range(1, len(output)):
            parser = Parser(BYTES, thinking=True, tools=names)
            assert list(joined([*parser.push(output[:cut]), *parser.push(output[cut:]), *parser.finish()])) == events


_STRING = re.compile(r'"(?:[^"\\\x7f]|\\[^/])*"')


def bounded(parsed, values) -> bool:
    """Whether an output stays within the bounds that the grammar has and the parser has not."""
    for text in values:
        if _STRING.sub('""', text) != text and ("\x7f" in text or "\\/" in text):
            return False
        bare = _STRING.sub("0", text)
        if bare != bare.strip() or not all(re.fullmatch(r" |\n {0,32}", run) for run in re.findall(r"\s+", bare)):
            return False
    keys = [key for c in parsed.tool_calls for key in c.arguments]
    return len(parsed.tool_calls) <= MOST_CALLS and all(len(key) <= 64 for key in keys)


def json_values(output) -> list[str]:
    """Texts of the arguments that are no strings, read off the ids by hand."""
    text = BYTES.decode(output, skip_special=False)
    return re.findall(r'type="(?!string)\w*"<\|sep\|>(.*?)<\|close\|>argument', text, re.DOTALL)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_grammar_allows_what_the_parser_reads_without_a_problem(count):
    mask = answer_mask(BYTES, thinking=True, tools=FREE)
    seen = {True: 0, False: 0}

    @settings(max_examples=count(full=20_000, reduced=250))
    @given(outputs)
    def both_ways(output):
        parsed = parse(BYTES, output, thinking=True, tools=("f", 'q"&'))
        if BYTES.special.end_of_msg in output:  # what stands behind the end is not part of the answer
            output = output[: output.index(BYTES.special.end_of_msg) + 1]
        expected = not parsed.problems and bounded(parsed, json_values(output))
        assert accepts(mask, output) == expected, parsed
        seen[expected] += 1

    both_ways()
    assert min(seen.values()) > 20, seen


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_mutated_answers_are_judged_alike(count):
    """One id of a drawn answer is dropped, doubled or replaced; grammar and parser must agree about the rest."""
    mask = answer_mask(BYTES, thinking=False, tools=FREE, tool_choice="required")
    seen = {True: 0, False: 0}

    @settings(max_examples=count(full=5_000, reduced=60))
    @given(st.integers(0, 10**6), st.data())
    def judge(seed, data):
        output = draw(mask.start(), seed, longest=400, ending=0.7)
        at = data.draw(st.integers(0, len(output) - 1))
        put = data.draw(st.sampled_from([[], output[at : at + 1] * 2, [BYTES.special.sep], [65], [0xE9]]))
        output = output[:at] + put + output[at + 1 :]
        parsed = parse(BYTES, output, thinking=False, tools=("f", 'q"&'))
        if BYTES.special.end_of_msg in output:
            output = output[: output.index(BYTES.special.end_of_msg) + 1]
        expected = not parsed.problems and bool(parsed.tool_calls) and bounded(parsed, json_values(output))
        assert accepts(mask, output) == expected, parsed
        seen[expected] += 1

    judge()
    assert min(seen.values()) > 3, seen


@given(
    st.fixed_dictionaries(
        {
            "city": st.text(min_size=1, max_size=8),
            "unit": st.sampled_from(["C", "F", 0, None]),
            "where": st.fixed_dictionaries({"x": st.integers() | st.floats(allow_nan=False, allow_infinity=False)}),
        },
        optional={
            "days": st.none() | st.integers(1, 14),
            "code": st.from_regex(r"\A[A-Z]{2,3}[0-9]?\Z"),
            "tags": st.just("none") | st.lists(st.text(alphabet="ab", max_size=3), max_size=2),
        },
    ),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
)
def test_rendered_calls_that_are_valid_are_allowed(weather, others):
    """The other way round: what the renderer writes for arguments that a schema allows, the grammar allows too."""
    jsonschema.validate(weather, WEATHER)
    weather = {key: weather[key] for key in WEATHER["properties"] if key in weather}
    others = {"a": True} | {key: value for key, value in others.items() if key != "a"}
    calls = [("weather", weather), ('q"&', others), ("now", {}), ("free", weather)]
    message = {
        "role": "assistant", "content": "é",
        "tool_calls": [{"function": {"name": name, "arguments": json.dumps(value)}} for name, value in calls],
    }  # fmt: skip
    for tokenizer in (BYTES, bpe()):
        whole = render(tokenizer, [message], thinking=False, add_generation_prompt=False).ids
        opened = len(ids(open_tag("message", {"role": "assistant"}), open_tag("response"), tokenizer=tokenizer))
        assert accepts(any_call(tokenizer), whole[opened:])


@pytest.mark.parametrize(
    "arguments",
    [
        [argument("unit", "string", "C"), argument("city", "string", "x")],  # another order
        [argument("city", "string", "x" * 9)],
        [argument("city", "string", "")],
        [argument("city", "number", "3")],
        [argument("city", "string", "x"), argument("days", "number", "0")],
        [argument("city", "string", "x"), argument("days", "number", "1.5")],
        [argument("city", "string", "x"), argument("unit", "string", "K")],
        [argument("city", "string", "x"), argument("unit", "number", "1")],
        [argument("city", "string", "x"), argument("unit", "null", "null"), argument("code", "string", "A")],
        [argument("city", "string", "x"), argument("unit", "null", "null"), argument("more", "string", "A")],
        [argument("city", "string", "x"), argument("unit", "null", "null"), argument("where", "object", "{}")],
        [argument("city", "string", "x"), argument("unit", "null", "null")],  # where is required
    ],
)
def test_calls_that_a_schema_forbids(arguments):
    mask = answer_mask(BYTES, thinking=False, tools=TOOLS)
    where = argument("where", "object", '{"x": 1}')
    good = [argument("city", "string", "x"), argument("unit", "string", "C"), where]
    assert accepts(mask, ids(answer("", tools(call("weather", 1, *good)))))
    assert not accepts(mask, ids(answer("", tools(call("weather", 1, *arguments)))))


def test_dynamic_keys_exclude_declared_ones():
    mask = answer_mask(BYTES, thinking=False, tools=TOOLS)
    for arguments, allowed in [
        ([argument("b", "number", "1"), argument('c"&', "string", "x"), argument("b", "string", "")], True),
        ([argument("a", "boolean", "true"), argument("ab", "number", "1")], True),
        ([argument("a", "number", "1")], False),
        ([argument("b", "boolean", "true")], False),
    ]:
        assert accepts(mask, ids(answer("", tools(call('q"&', 1, *arguments))))) == allowed


def test_choices_of_tools():
    nothing, once = ids(answer("no")), ids(answer("", tools(call("now", 1))))
    twice, other = ids(answer("", tools(call("now", 1), call("now", 2)))), ids(answer("", tools(call("free", 1))))
    many = ids(answer("", tools(*(call("now", i) for i in range(1, MOST_CALLS + 1)))))
    more = ids(answer("", tools(*(call("now", i) for i in range(1, MOST_CALLS + 2)))))
    named = {"type": "function", "function": {"name": "now"}}
    for request, expected in [
        ({}, [True, True, True, True, True, False]),
        ({"tool_choice": "none"}, [True, False, False, False, False, False]),
        ({"tool_choice": "required"}, [False, True, True, True, True, False]),
        ({"tool_choice": "required", "parallel": False}, [False, True, False, True, False, False]),
        ({"tool_choice": named}, [False, True, False, False, False, False]),
    ]:
        mask = answer_mask(BYTES, thinking=False, tools=TOOLS, **request)
        assert [accepts(mask, output) for output in (nothing, once, twice, other, many, more)] == expected, request


def test_a_json_answer_may_give_way_to_calls_only():
    form = {"type": "json_object"}
    mask = answer_mask(BYTES, thinking=False, tools=TOOLS, response_format=form)
    assert accepts(mask, ids(answer("{}"))) and accepts(mask, ids(answer('{"a": 1}', tools(call("now", 1)))))
    assert accepts(mask, ids(answer("", tools(call("now", 1)))))
    for text in ("", "[]", "{} ", "x"):
        assert not accepts(mask, ids(answer(text)))


def test_forced_words_are_one_path():
    """Inside of tags nothing is left to chance, whatever the tokenizer: the mask has the canonical id alone."""
    tokenizer = bpe()
    mask = answer_mask(tokenizer, thinking=True, tools=[tool("get_weather")], tool_choice="required", parallel=False)
    expected = ids(
        "t", close_tag("think"), open_tag("response"), answer("", tools(call("get_weather", 1))), tokenizer=tokenizer
    )
    constraint, free = mask.start(), 0
    for token_id in expected:
        allowed = constraint.mask()
        assert allowed[token_id]
        free += allowed.sum() > 1
        constraint.advance(token_id)
    assert constraint.is_end and free < 12


def test_t61_white_space_is_bounded():
    """A model that likes spaces still comes to an end."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for form in ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, {"tools": [tool("f", schema)], "tool_choice": {"function": {"name": "f"}}}):  # fmt: skip
        constraint = answer_mask(BYTES, thinking=False, **form).start()
        out: list[int] = []
        while not constraint.is_end:
            allowed = constraint.mask()
            controls = [i for i in (BYTES.special.close, BYTES.special.end_of_msg) if allowed[i]]
            out.append(controls[0] if controls else next(i for i in [*b" \n", *range(BYTES.vocab_size)] if allowed[i]))
            constraint.advance(out[-1])
            assert len(out) < 1000, BYTES.decode(out, skip_special=False)[:300]
        parsed = parse(BYTES, out, thinking=False, tools=("f",))
        value = parsed.tool_calls[0].arguments if parsed.tool_calls else json.loads(parsed.content)
        jsonschema.validate(value, schema)


def test_t26_nothing_follows_the_end():
    constraint = answer_mask(BYTES, thinking=False, response_format={"type": "json_object"}).start()
    for token_id in ids(answer("{}")):
        constraint.advance(token_id)
    assert constraint.is_end
    constraint = answer_mask(BYTES, thinking=False, response_format={"type": "json_object"}).start()
    with pytest.raises(RequestError, match="any further"):
        constraint.advance(65)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"type": "array"}, '"object"'),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"properties": {"a": {"type": "text"}}}, "properties.a.type"),
        ({"properties": {"a": 3}}, "properties.a must be a JSON schema"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "not"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "alternatives"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "cannot be constrained"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "#/\\$defs/b"),
        ({"properties": {"a": {"$ref": "http://x"}}}, "http://x"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "without an end"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}}, "oneOf"),
        ({"properties": {"a": {"type": "string", "anyOf": [{"pattern": "a"}, {"pattern": "b"}]}}}, "anyOf"),
        ({"properties": {"a": False}, "required": ["a"]}, "no value"),
        ({"properties": [], "required": []}, "object as properties"),
        ({"properties": {}, "required": [[]]}, "list of names"),
        ({"properties": {"a": {"enum": "ab"}}}, "enum"),
        ({"properties": {"a": {"type": "array", "contains": {"type": "null"}}}}, "cannot be constrained"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(parameters, match):
    with pytest.raises(RequestError, match=match):
        answer_mask(BYTES, thinking=False, tools=[tool("f", parameters)])
    answer_mask(BYTES, thinking=False, tools=[tool("f", parameters, strict=False)])


_keywords = st.sampled_from(
    ["type", "properties", "required", "additionalProperties", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs",
     "items", "minLength", "maxLength", "minimum", "pattern", "format", "a", "description"]
)  # fmt: skip
_schemas = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from([*TYPES, "integer", "#", "#/$defs/a", "^a+$", "[", "date"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_keywords, inner, max_size=4),
    max_leaves=12,
)


@given(_schemas)
def test_any_schema_is_enforced_or_refused(schema):
    """Never another error, and what is drawn is valid for every schema that the oracle finds valid itself."""
    try:
        mask = answer_mask(BYTES, thinking=False, tools=[tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"a": {"type": "null"}}})], tool_choice="required", parallel=False)  # fmt: skip
    except RequestError:
        return
    output = draw(mask.start(), 0, longest=800, ending=0.8)
    parsed = parse(BYTES, output, thinking=False, tools=("f",))
    if parsed.finished:
        assert parsed.problems == () and "a" in parsed.tool_calls[0].arguments
        whole = {"$defs": {"a": {"type": "null"}}, "properties": {"a": schema}}
        with contextlib.suppress(jsonschema.SchemaError):
            jsonschema.Draft202012Validator.check_schema(whole)
            jsonschema.validate(parsed.tool_calls[0].arguments, whole)


def test_schemas_that_are_too_deep_are_refused():
    deep: dict = {"type": "string"}
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="deep"):
        answer_mask(BYTES, thinking=False, tools=[tool("f", {"properties": {"a": deep}})])


def test_when_a_grammar_is_needed():
    strict = [tool("f", strict=True)]
    for choice, tools_, form, needed in [
        ("auto", [], None, False), ("auto", TOOLS, None, False), ("auto", strict, None, True),
        ("none", strict, None, False), ("required", TOOLS, None, True),
        ({"function": {"name": "now"}}, TOOLS, None, True), ("auto", [], {"type": "text"}, False),
        ("none", TOOLS, {"type": "json_object"}, True),
    ]:  # fmt: skip
        assert needs_grammar(tools_, choice, form) == needed
    for request, match in [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "rm"}}}, "'rm'"),
        ({"response_format": {"type": "xml"}}, "xml"),
    ]:
        with pytest.raises(RequestError, match=match):
            answer_mask(BYTES, thinking=False, **request)


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install perilune\[grammar\]"):
        answer_mask(BYTES, thinking=False, response_format={"type": "json_object"})


def test_markers_spelled_out_are_text():
    mask = answer_mask(BYTES, thinking=False)
    assert accepts(mask, ids(answer("<|close|>response<|sep|><|end_of_msg|>")))
    assert not accepts(mask, ids("a", OPEN, "b", SEP, answer("")))
    assert not accepts(mask, ids("a", CLOSE, "think", SEP, END))
