"""Structured outputs: whatever is drawn under the grammar has the form, judged by `re`, jsonschema and plain lists."""

from __future__ import annotations

import functools
import json
import random
import re

import jsonschema
import pytest
from tiny_model import tiny_engine

from perilune.serve.request import ChatOptions, FieldError, SamplingParams, Structured
from perilune.serve.structured import rule, text_mask
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml.grammar import answer_mask
from perilune.tokenizer.xtml.parse import parse

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

TOKENIZER = ByteTokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 400}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "json": (SCHEMA, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    "regex": (r"[a-c]{2,4}/\d+(\.\d\d)?", lambda text: re.fullmatch(r"[a-c]{2,4}/\d+(\.\d\d)?", text)),
    "choice": (["yes", "no", "yes and no"], lambda text: text in ("yes", "no", "yes and no")),
    "grammar": ('root ::= "x" [0-9]+ tail\ntail ::= "!" | "?"', lambda text: re.fullmatch(r"x[0-9]+[!?]", text)),
}


def walk(mask, seed: int) -> list[int]:
    """A random answer; it takes the end wherever the grammar allows it."""
    chance, state, ids = random.Random(seed), mask.start(), []
    end = TOKENIZER.special.end_of_msg
    for _ in range(2000):
        allowed = state.mask().nonzero()[0].tolist()
        ids.append(end if end in allowed and chance.random() < 0.5 else chance.choice(allowed))
        state.advance(ids[-1])
        if state.is_end:
            return ids
    raise AssertionError("the grammar does not end")


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_a_continuation_has_the_form(kind, seed):
    value, holds = FORMS[kind]
    assert holds(TOKENIZER.decode(walk(text_mask(TOKENIZER, Structured(kind, value)), seed)))


@pytest.mark.parametrize("kind", ["regex", "choice", "grammar"])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_response_of_a_chat_has_the_form_and_the_reasoning_is_free(kind, thinking):
    value, holds = FORMS[kind]
    mask = answer_mask(TOKENIZER, thinking=thinking, response=functools.partial(rule, Structured(kind, value)))
    answer = parse(TOKENIZER, walk(mask, 3), thinking=thinking)
    assert not answer.problems and holds(answer.content)


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("json", "{}", "give a JSON schema"),
        ("json", {"type": "wrong"}, "cannot be constrained"),
        ("regex", "(", "cannot be constrained"),
        ("regex", "", "give a text"),
        ("choice", [], "give a list"),
        ("choice", ["a", 1], "give a list"),
        ("grammar", "a ::= ", "cannot be"),
        ("grammar", "nothing", "no rule named start"),
        ("grammar", 'start: "a" } r9: "b"', "cannot be constrained"),
    ],
)
def test_forms_that_cannot_be_kept_name_the_field(kind, value, problem):
    with pytest.raises(FieldError, match=problem) as caught:
        text_mask(TOKENIZER, Structured(kind, value))
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "f"}},)])
def test_forms_of_a_chat_name_their_field_too(tools):
    engine = tiny_engine()
    for form in (Structured("regex", "("), Structured("choice", [])):
        with pytest.raises(FieldError) as caught:
            engine.chat(
                [{"role": "user", "content": "Hi"}], SamplingParams(structured=form), 1, ChatOptions(tools=tools)
            )
        assert caught.value.param == "structured_outputs"
