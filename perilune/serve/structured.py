"""The form that a request demands of its answer, as a grammar over the tokenizer's ids (extra: grammar)."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from perilune.errors import RequestError
from perilune.serve.request import FieldError, Structured
from perilune.tokenizer import Tokenizer
from perilune.tokenizer.xtml.grammar_mask import TokenMask, llguidance
from perilune.tokenizer.xtml.grammar_schema import Rules, literal

FIELD = "structured_outputs"


def text_mask(tokenizer: Tokenizer, structured: Structured) -> TokenMask:
    """The grammar of a continuation.

    Raises:
        FieldError: the form cannot be enforced.
        RequestError: llguidance is not installed.
    """
    return _text_mask(tokenizer, structured.kind, json.dumps(structured.value))


@functools.lru_cache(maxsize=64)  # a form is usually asked for many times
def _text_mask(tokenizer: Tokenizer, kind: Any, value: str) -> TokenMask:
    rules = Rules()
    body = rule(Structured(kind, json.loads(value)), rules)
    try:
        return TokenMask(tokenizer, "\n".join([f"start: {body}", *rules.lines, ""]))
    except RequestError as error:
        raise FieldError(str(error), FIELD) from None


def rule(structured: Structured, rules: Rules) -> str:
    """Name of a rule for a text of this form.

    Raises:
        FieldError: the value is none that its kind allows.
    """
    value, where = structured.value, f"{FIELD}.{structured.kind}"
    if structured.kind == "json":
        if not isinstance(value, (dict, bool)):
            raise FieldError(f"{where} is {_shown(value)}; give a JSON schema", FIELD)
        return rules.json(value)
    if structured.kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise FieldError(f"{where} is {_shown(value)}; give a list of texts that are not empty", FIELD)
        return rules.rule(" | ".join(literal(text) for text in value))
    if not isinstance(value, str) or not value:
        raise FieldError(f"{where} is {_shown(value)}; give a text that is not empty", FIELD)
    try:
        if structured.kind == "regex":
            return rules.terminal(f"/{llguidance().regex_to_lark(value, 'dw')}/")
        if "::=" in value:
            value = llguidance().gbnf_to_lark.gbnf_to_lark(value)
    except RequestError:
        raise
    except Exception as error:  # the library's errors have no common class
        raise FieldError(f"{where} cannot be read: {str(error)[:200]}", FIELD) from None
    if re.search(r"^\s*start\b", value, re.MULTILINE) is None:
        raise FieldError(f"{where} has no rule named start (in GBNF: root)", FIELD)
    return rules.rule(f"%lark {{\n{value}\n}}")


def _shown(value: Any) -> str:
    return repr(value)[:80]
