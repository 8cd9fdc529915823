"""From the JSON schema of a tool's parameters to rules for its arguments.

An argument's type stands in its tag, so a schema is first split by type: `{"type": ["integer", "null"]}` becomes a number
or a null. A string is raw text and gets rules here; every other value is JSON and is left to llguidance's `%json`.
What the rules allow is always valid under the schema, but not everything valid is allowed: arguments come in the order of
`properties`, JSON has little white space, and undeclared arguments only where `additionalProperties` asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perilune.errors import RequestError
from perilune.tokenizer.xtml.markup import escape
from perilune.tokenizer.xtml.parse_value import TYPES, write_json

JSON_STYLE = {"whitespace_pattern": r" |\n[ ]{0,32}"}
"""White space between JSON tokens: a space, or a new line with its indentation. Bounded, or a model that likes spaces
would never end."""

KEY = r"(?:[^\"&]|&amp;|&quot;){0,64}"
"""An argument's name as written."""

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
     "$defs", "definitions")
)  # fmt: skip
_OBJECT_KEYS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_STRING_KEYS = _ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
_MADE_FOR = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_DEEPEST = 32


def literal(text: str) -> str:
    """A text as a literal of the grammar."""
    return json.dumps(text)


@dataclass
class Rules:
    """Lines of a grammar in llguidance's Lark dialect."""

    lines: list[str] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)

    def rule(self, body: str) -> str:
        """Name of a rule with this body."""
        return self._add("r", body)

    def terminal(self, body: str) -> str:
        """Name of a terminal (one regular expression) with this body."""
        return self._add("T", body)

    def json(self, schema: Any) -> str:
        """Name of a rule for JSON that is valid under a schema."""
        body = {"x-guidance": JSON_STYLE} | (schema if isinstance(schema, dict) else {"anyOf": [schema]})
        return self.rule(f"%json {json.dumps(body)}")

    def _add(self, prefix: str, body: str) -> str:
        name = self._known.get(prefix + body)
        if name is None:
            name = self._known[prefix + body] = f"{prefix}{len(self.lines)}"
            self.lines.append(f"{name}: {body}")
        return name


@dataclass(frozen=True)
class Markers:
    """The control tokens as the grammar writes them."""

    open: str
    close: str
    sep: str


def argument_rules(rules: Rules, markers: Markers, parameters: Any, where: str) -> str:
    """Body of a rule for all arguments of a call.

    Args:
        rules: takes the rules that it needs.
        parameters: JSON schema of the arguments' object; None allows no argument.
        where: of the schema in the request, for messages.

    Raises:
        RequestError: the schema says something that cannot be enforced.
    """
    root = {} if parameters is None else parameters
    schema = _dereferenced(root, root, where)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(f'{where} must be a JSON schema of type "object"; it is {_shown(schema)}')
    _refuse_others(schema, _OBJECT_KEYS, where)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not _all_texts(required):
        raise RequestError(f"{where} needs an object as properties and a list of names as required")
    properties = properties | {key: True for key in required if key not in properties}
    parts = []
    for key, value in properties.items():
        written = []
        for kind, body in _alternatives(rules, value, root, f"{where}.properties.{key}").items():
            head = literal(f'argument key="{escape(key)}" type="{kind}"')
            written.append(f'{markers.open} {head} {markers.sep} ({body}) {markers.close} "argument" {markers.sep}')
        if written:
            name = rules.rule(" | ".join(written))
            parts.append(name if key in required else f"{name}?")
        elif key in required:
            raise RequestError(f"{where}.properties.{key} is required, and no value is valid")
    extra = schema.get("additionalProperties", False)
    others = _alternatives(rules, extra, root, f"{where}.additionalProperties")
    if others:
        parts.append(f"({free_arguments(rules, markers, others, tuple(properties))})*")
    return " ".join(parts) or '""'


def free_arguments(
    rules: Rules, markers: Markers, kinds: Mapping[str, str] | None = None, taken: tuple[str, ...] = ()
) -> str:
    """Body of a rule for one argument of any name but those `taken`, of the given types (default: all six)."""
    if kinds is None:
        kinds = _alternatives(rules, True, {}, "")
    written = []
    for kind, body in kinds.items():
        head = rf'/argument key="{KEY}" type="{kind}"/'
        if taken:
            used = rules.terminal(" | ".join(literal(f'argument key="{escape(key)}" type="{kind}"') for key in taken))
            head = rules.terminal(f"{head} & ~({used})")
        written.append(f'{markers.open} {head} {markers.sep} ({body}) {markers.close} "argument" {markers.sep}')
    return " | ".join(written)


def _alternatives(rules: Rules, schema: Any, root: Any, where: str) -> dict[str, str]:
    """Type of an argument -> body of a rule for its values."""
    found: dict[str, list[Any]] = {}
    for kind, part in _split(schema, root, where, 0):
        found.setdefault(kind, []).append(part)
    bodies = {}
    for kind in TYPES:
        parts = found.get(kind, [])
        if not parts:
            continue
        if kind == "string":
            bodies[kind] = " | ".join(_string(rules, part, where) for part in parts)
        else:
            whole = parts[0] if len(parts) == 1 else {"anyOf": parts}
            bodies[kind] = rules.json(_with_root(whole, root))
    return bodies


def _split(schema: Any, root: Any, where: str, depth: int) -> list[tuple[str, Any]]:
    """(type, schema of that type alone) of every alternative."""
    if depth > _DEEPEST:
        raise RequestError(f"{where} refers to itself without an end")
    if schema is False:
        return []
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"{where} must be a JSON schema; it is {_shown(schema)}")
    schema = _dereferenced(schema, root, where)
    if not isinstance(schema, dict):
        return _split(schema, root, where, depth + 1)
    branches = next((key for key in ("anyOf", "oneOf", "allOf") if key in schema), None)
    if branches is not None:
        kinds = _kinds(schema["type"], where) if "type" in schema else []
        if kinds and "string" not in kinds:
            return [(kind, schema | {"type": kind}) for kind in kinds]
        rest, parts = set(schema) - _ANNOTATIONS - {branches}, schema[branches]
        if rest or not isinstance(parts, list) or (branches == "allOf" and len(parts) != 1):
            raise _unsupported(f"{branches} beside {', '.join(sorted(rest))}" if rest else branches, where)
        found = [pair for part in parts for pair in _split(part, root, where, depth + 1)]
        kinds = [kind for kind, _ in found]
        if branches == "oneOf" and len(set(kinds)) < len(kinds) and not all("const" in part for _, part in found):
            raise _unsupported("oneOf of two schemas of one type (use anyOf)", where)
        return found
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise RequestError(f"{where}.enum is {_shown(values)}; give a list")
        allowed = _kinds(schema.get("type"), where)
        return [(kind, {"const": value}) for value in values if (kind := _kind_of(value)) in allowed]
    if "type" not in schema:
        hinted = [kind for kind, keys in _MADE_FOR.items() if any(key in schema for key in keys)]
        return [(kind, schema | {"type": kind}) for kind in hinted or TYPES]
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kinds = _kinds(named, where)
    return [
        (kind, schema | {"type": "integer" if kind == "number" and "number" not in named else kind}) for kind in kinds
    ]


def _kinds(named: Any, where: str) -> list[str]:
    """Argument types of a schema's `type`."""
    if named is None:
        return list(TYPES)
    kinds = ["number" if kind == "integer" else kind for kind in (named if isinstance(named, list) else [named])]
    for kind in kinds:
        if kind not in TYPES:
            raise RequestError(f"{where}.type is {_shown(named)}; allowed: {', '.join(TYPES)}, integer")
    return list(dict.fromkeys(kinds))


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    classes = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    return classes.get(type(value), "null")


def _string(rules: Rules, schema: dict[str, Any], where: str) -> str:
    """Body for the raw text of a string."""
    _refuse_others(schema, _STRING_KEYS, where)
    if "const" in schema:
        return literal(schema["const"])
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    expressions = []
    if low or high != "":
        if not all(isinstance(bound, int) or bound == "" for bound in (low, high)):
            raise RequestError(f"{where} needs whole numbers as minLength and maxLength")
        expressions.append(f"/(?s:.{{{low},{high}}})/")
    if "pattern" in schema:
        expressions.append(_pattern(schema["pattern"], where))
    return rules.terminal(" & ".join(expressions) or "/(?s:.*)/")


def _pattern(pattern: Any, where: str) -> str:
    """A schema's pattern, which may match anywhere in the text, as an expression for the whole text."""
    from perilune.tokenizer.xtml.grammar_mask import llguidance

    if not isinstance(pattern, str):
        raise RequestError(f"{where}.pattern is {_shown(pattern)}; give a string")
    head, tail = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    if (head or tail) and _splits_at_top(pattern):
        raise _unsupported("a pattern with anchors and alternatives outside of parentheses", where)
    core = pattern[head : len(pattern) - tail]
    written = ("" if head else "(?s:.*)") + f"(?:{core})" + ("" if tail else "(?s:.*)")
    return f"/{llguidance().regex_to_lark(written, 'dw')}/"


def _splits_at_top(pattern: str) -> bool:
    """Whether a `|` stands outside of all parentheses and classes."""
    depth, in_class, escaped = 0, False, False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return True
    return False


def _dereferenced(schema: Any, root: Any, where: str) -> Any:
    """Follow references of this very document."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        others = set(schema) - _ANNOTATIONS - {"$ref"}
        if others:
            raise _unsupported(f"$ref beside {', '.join(sorted(others))}", where)
        reference, target = schema["$ref"], root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise RequestError(
                f"{where} refers to {_shown(reference)}; only references into the same schema (#/…) work"
            )
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or step not in target:
                raise RequestError(f"{where} refers to {reference!r}, which is not in the schema")
            target = target[step]
        schema = target
    raise RequestError(f"{where} refers to itself without an end")


def _with_root(schema: Any, root: Any) -> Any:
    """A part of a schema that can stand alone: references find the whole schema under `$defs`."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    return _moved(schema) | {"$defs": {"root": _moved(root)}}


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/root{value[1:]}" if key == "$ref" and isinstance(value, str) else _moved(value)
        for key, value in schema.items()
    }


def _refuse_others(schema: dict[str, Any], known: frozenset[str], where: str) -> None:
    others = sorted(set(schema) - known)
    if others:
        raise _unsupported(", ".join(others), where)


def _unsupported(what: str, where: str) -> RequestError:
    return RequestError(
        f"{where} has {what}, which cannot be enforced while the answer is drawn; leave it out, or set strict to false "
        "for this tool"
    )


def _all_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _shown(value: Any) -> str:
    try:
        return write_json(value)[:80]
    except (TypeError, ValueError):
        return repr(value)[:80]
