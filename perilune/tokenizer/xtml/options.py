"""Options of a request as messages of the conversation.

Global options (tools, thinking effort) stand before the conversation, one-shot options (tool choice, response format)
behind it, so that the cache of the history survives a change of the latter (report App. F).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from perilune.errors import RequestError
from perilune.tokenizer.xtml.messages import checked_text, sorted_json
from perilune.tokenizer.xtml.template import Wording

EFFORTS = ("low", "high", "max")
"""Thinking efforts. The format reserves a fourth, `medium`, which the published model refuses; so do we."""


class OptionMessage(NamedTuple):
    """A system message with a `type` attribute and a body."""

    type: str
    body: str


def tool_declaration(tools: Sequence[Any], wording: Wording, where: str, *, added: bool = False) -> OptionMessage:
    """Declares tools: of the whole conversation, or `added` on the way."""
    body = wording.fill("tools_added" if added else "tools_declared", sorted_json(tools, where))
    return OptionMessage("tool-declare", body)


def global_options(
    tools: Sequence[Any], effort: str | None, *, thinking: bool, wording: Wording
) -> list[OptionMessage]:
    """Options before the conversation; effort is said only where there is thinking.

    Raises:
        RequestError: an effort that is not one of `EFFORTS`, tools that JSON cannot express.
    """
    if effort is not None and effort not in EFFORTS:
        reserved = "; medium is reserved, and no model knows it" if effort == "medium" else ""
        raise RequestError(f"the thinking effort is {effort!r}; allowed: {', '.join(EFFORTS)}{reserved}")
    options = [tool_declaration(tools, wording, "tools")] if tools else []
    if thinking and effort is not None:
        options.append(OptionMessage("thinking-effort", wording.fill("thinking_effort", effort)))
    return options


def one_shot_options(
    tool_choice: Any, response_format: Any, *, tool_names: Sequence[str], wording: Wording
) -> list[OptionMessage]:
    """Options behind the conversation.

    The format can say that tools must or must not be called. It has no message for one named tool: that is left to
    the output's grammar.

    Args:
        tool_choice: None, "auto", "none", "required", or `{"type": "function", "function": {"name": …}}`.
        response_format: None, or `{"type": "text" | "json_object" | "json_schema", …}`.
        tool_names: all tools that the request and the conversation declare.
        wording: texts.

    Raises:
        RequestError: another value, or a choice of tools that are not declared.
    """
    options: list[OptionMessage] = []
    choice = _choice(tool_choice, tool_names)
    if choice in ("required", "none"):
        options.append(OptionMessage("tool-choice", wording.fill(f"tool_choice_{choice}")))
    if response_format is None:
        return options
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        options.append(OptionMessage("response-format", wording.fill("response_json_object")))
    elif kind == "json_schema":
        body = wording.fill("response_json_schema", _schema(response_format))
        options.append(OptionMessage("response-format", body))
    elif kind != "text":
        raise RequestError(
            f'response_format is {str(response_format)[:80]}; give {{"type": …}} of text, json_object or json_schema'
        )
    return options


def _choice(tool_choice: Any, tool_names: Sequence[str]) -> str:
    if tool_choice is None or tool_choice == "auto":
        return "auto"
    if tool_choice == "none":
        return "none"
    if tool_choice == "required":
        if not tool_names:
            raise RequestError("tool_choice is 'required', but no tools are declared; give tools")
        return "required"
    if isinstance(tool_choice, Mapping) and isinstance(tool_choice.get("function"), Mapping):
        name = checked_text(tool_choice["function"].get("name"), "tool_choice.function.name")
        if name not in tool_names:
            declared = ", ".join(tool_names) or "none"
            raise RequestError(f"tool_choice names the tool {name!r}, which is not declared; declared: {declared}")
        return "named"
    raise RequestError(
        f"tool_choice is {str(tool_choice)[:80]!r}; allowed: auto, none, required, or "
        '{"type": "function", "function": {"name": …}}'
    )


def _schema(response_format: Mapping[str, Any]) -> str:
    definition = response_format.get("json_schema")
    schema = definition.get("schema") if isinstance(definition, Mapping) else None
    where = "response_format.json_schema.schema"
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{where} is {'missing' if schema is None else type(schema).__name__}; give a JSON Schema")
    return sorted_json(schema, where)
