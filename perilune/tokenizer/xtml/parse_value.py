"""Text of a typed argument to its value."""

from __future__ import annotations

import json
import sys
from typing import Any

TYPES = ("string", "number", "boolean", "null", "object", "array")
"""Values of an argument's `type`."""

_LONGEST_INT = 4300
"""Digits that Python turns into a whole number unless told otherwise."""

_CLASSES = {"number": (int, float), "boolean": bool, "null": type(None), "object": dict, "array": list}


def read_value(kind: str, text: str) -> tuple[Any, bool]:
    """(value, whether the text is valid for the type `kind`).

    A string is its text. Anything else is JSON (RFC 8259: no NaN, no infinity), and valid if it is of the type that the
    argument names; a number beyond fp64 is the largest that fp64 has. Text that is no such JSON, that is nested too deeply
    to read, or that could not be written again (a lone surrogate) is the value itself.
    """
    if kind == "string":
        return text, True
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
        write_json(value).encode()
    except (ValueError, RecursionError):
        return text, False
    expected = _CLASSES.get(kind, ())
    return value, isinstance(value, expected) and isinstance(value, bool) == (kind == "boolean")


def write_json(value: Any) -> str:
    """JSON as the renderer writes values: `, ` and `: `, other scripts kept. ValueError for what JSON cannot say."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _float(digits: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(digits)))


def _int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_INT else _float(digits)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
