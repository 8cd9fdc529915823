"""Requests as clients send them, checked by type. An unknown field is an error: it would be a wish that nobody heard."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import msgspec

from perilune.errors import RequestError
from perilune.sandbox.protocol import Result

T = TypeVar("T")
Cells = Annotated[int, msgspec.Meta(ge=1, le=0xFFFF)]
"""Rows or columns of a terminal."""
HEADER_BYTES = 1 << 20
"""Most bytes of the line that describes a command."""


class Create(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sandboxes. `snapshot` excludes `driver` and `spec`; see `Pool.create` for the rest."""

    driver: str | None = None
    spec: dict[str, Any] | None = None
    snapshot: str | None = None
    name: str | None = None
    lifetime_seconds: float | None = None
    idle_seconds: float | None = None


class Exec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST …/exec: one line of JSON, then the command's input as it is; options as `Sandbox.start`.

    Attributes:
        stream: answer with events as output comes; else one JSON object at the end.
        terminal: run it on a pseudo-terminal of `rows` and `columns`; needs `stream`.
    """

    argv: list[str]
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    cwd: str = "/workspace"
    timeout: float | None = None
    stream: bool = False
    terminal: bool = False
    rows: Cells = 24
    columns: Cells = 80


class Window(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PUT /v1/commands/ID/window: the size of a terminal."""

    rows: Cells
    columns: Cells


class Pause(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST …/pause."""

    keep_memory: bool = False


class Fork(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST …/fork; the copies are called `name`-1, `name`-2, …, or by their ids."""

    count: int = 1
    name: str | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """A request of this kind; an empty body has no fields. Raises RequestError, naming the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request's JSON cannot be used: {error}") from None


def result_body(result: Result, *, output: bool) -> dict[str, Any]:
    """A result as JSON; output that is not text is in `stdout_base64` and `stderr_base64`.

    Args:
        output: with the kept output; False where it was streamed.
    """
    values = asdict(result) | {"truncated": result.truncated}
    for stream in ("stdout", "stderr"):
        data = getattr(result, stream)
        if not output:
            del values[stream]
            continue
        try:
            values[stream] = data.decode()
        except UnicodeDecodeError:
            values[stream], values[f"{stream}_base64"] = "", base64.b64encode(data).decode()
    return values
