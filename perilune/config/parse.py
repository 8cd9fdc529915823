"""One parser for files and flags: a TOML file becomes flags, the user's flags follow, tyro types both.

Later values win, unknown keys are an error that names the nearest key, and a resolved configuration written by
`to_toml` parses back to an equal object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from perilune.errors import ConfigError

T = TypeVar("T")
NONE = "none"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionary of a config dataclass (tuples become lists, None stays None)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        return value

    return plain(config)


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from a nested dictionary, checking names and types.

    Raises:
        ConfigError: not a dictionary, an unknown key (with the nearest known one), a missing key, a value of the wrong
            type, or a number that is not finite.
    """
    import difflib
    import types
    import typing

    if not isinstance(values, dict):
        raise ConfigError(f"{where.rstrip('.') or 'the configuration'}={values!r} must be a table of settings")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; perhaps you meant {where}{near[0]}" if near else ""
            raise ConfigError(f"unknown setting {where}{key}{hint}. Known here: {', '.join(known)}")

    def build(hint: Any, value: Any, path: str) -> Any:
        origin = typing.get_origin(hint)
        if origin in (typing.Union, types.UnionType):
            options = typing.get_args(hint)
            if value is None or value == NONE:
                if type(None) in options:
                    return None
                raise ConfigError(f"{path} must not be empty")
            return build(next(o for o in options if o is not type(None)), value, path)
        if dataclasses.is_dataclass(hint):
            return from_dict(hint, value, path + ".")
        if origin is tuple:
            if not isinstance(value, (list, tuple)):
                raise ConfigError(f"{path}={value!r} must be a list")
            item = typing.get_args(hint)[0]
            return tuple(build(item, v, f"{path}[{i}]") for i, v in enumerate(value))
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
            raise ConfigError(f"{path}={value!r} must be of type {hint.__name__}, not {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}={value} must be a finite number")
        return value

    built = {key: build(hints[key], value, where + key) for key, value in values.items()}
    required = {
        name for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }  # fmt: skip
    missing = sorted(required - set(built))
    if missing:
        raise ConfigError(f"missing settings: {', '.join(where + name for name in missing)}")
    return cls(**built)


def to_toml(config: Any) -> str:
    """Resolved TOML text of a config; None is written as the word "none", which `from_dict` reads back."""

    def spoken(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: spoken(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoken(v) for v in value]
        return NONE if value is None else value

    return tomli_w.dumps(spoken(to_dict(config)))


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; `from_dict` takes the word "none" for None where a setting may be None.

    Raises:
        ConfigError: the file is missing, unreadable, or not TOML (with line and column).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the nested `changes` laid over it; lists are replaced whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def parse_flags(cls: type[T], args: Sequence[str], default: T, *, prog: str, description: str = "") -> T:
    """Parse command-line flags over `default` with tyro.

    A verb's flat flags have switches (`--json`); in a tree of settings every flag takes a value, so that a setting can be
    turned off as well as on (`--model.mla.output-gate False`).

    Raises:
        ConfigError: an unknown flag, an ill-typed value or one that is not finite; the message carries tyro's suggestion.
        SystemExit: only for `--help` (code 0).
    """
    import tyro

    tree = any(dataclasses.is_dataclass(getattr(default, f.name)) for f in dataclasses.fields(default))
    markers = (tyro.conf.AvoidSubcommands, *((tyro.conf.FlagConversionOff,) if tree else ()))
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            parsed = tyro.cli(
                cls, args=list(args), default=default, prog=prog, description=description,
                config=markers,
            )  # fmt: skip
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_short(_ANSI.sub("", err.getvalue())) or f"cannot understand: {' '.join(args)}") from None
    _refuse_infinite(parsed)
    return parsed


def _refuse_infinite(value: Any, path: str = "") -> None:
    """ConfigError for a number in a parsed dataclass that is not finite: `nan` passes every comparison with a limit."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _refuse_infinite(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_infinite(item, f"{path}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"--{path.replace('_', '-')} {value} must be a finite number")


def _short(text: str) -> str:
    """Reduce tyro's boxed error to one line: what is wrong, wrapped lines joined, and the nearest known flag.

    The box is drawn in ASCII where stderr has no other letters, and its title repeats the first words of the text.
    """
    lines = [line.strip("│╭╰╮╯|+ ").strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    starts = [n for n, line in enumerate(lines) if line.startswith(("Unrecognized options:", "Error parsing"))]
    first = starts[0] if starts else min(1, len(lines) - 1)
    problem: list[str] = []
    for line in lines[first:]:
        if problem and re.match(r"[─-]{3}|Argument helptext|Perhaps you meant|For full helptext", line):
            break
        problem.append(line)
    message = " ".join(problem)
    if message.startswith("Unrecognized"):
        near = [line.split(" ")[0] for line in lines if re.match(r"--\w", line) and not line.startswith("--help")]
        return message + (f"; perhaps you meant {near[0]}" if near else "")
    message = message.removeprefix("Error parsing ")
    # Where a dataclass of ours refused its values, tyro puts that part of the tree in front of a message that says it.
    return re.sub(r"^[\w.]+: (?=[\w.]+=)", "", message)
