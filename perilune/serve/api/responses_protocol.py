"""Body of POST /v1/responses, the stateless part of it: items become messages, everything else a chat request.

Nothing is kept between requests: `previous_response_id`, `conversation` and `background` are refused, and `store` is
answered with false. The client sends the whole conversation, the output items of earlier responses among it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perilune.serve.api.chat_protocol import CalledFunction, ChatRequest, Message, ToolCall
from perilune.serve.api.content import Part
from perilune.serve.api.protocol import Sampling
from perilune.serve.request import FieldError


class Item(msgspec.Struct, kw_only=True):
    """One item of the input: a message, a call, its result, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class Reasoning(msgspec.Struct):
    """How much to think."""

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None

    def unsupported(self) -> list[tuple[str, bool]]:
        """See `Sampling.unsupported`."""
        return [
            ("previous_response_id", self.previous_response_id is not None),
            ("conversation", self.conversation is not None),
            ("background", bool(self.background)),
            ("prompt", self.prompt is not None),
            ("truncation", self.truncation not in (None, "disabled")),
            ("n", self.n not in (None, 1)),
        ]

    def token_limit(self) -> tuple[str, int | None]:
        """See `Sampling.token_limit`."""
        if self.max_output_tokens is not None:
            return "max_output_tokens", self.max_output_tokens
        return "max_tokens", self.max_tokens

    def alternatives(self) -> int | None:
        """See `Sampling.alternatives`."""
        asked = "message.output_text.logprobs" in (self.include or [])
        return (self.top_logprobs or 0) if asked or self.top_logprobs else None

    def chat(self) -> ChatRequest:
        """The same as a chat request.

        Raises:
            FieldError: an item that cannot be a message.
        """
        if self.input == []:
            raise FieldError("input is empty; give a text, or at least one item", "input")
        messages = [Message("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            messages.append(Message("user", self.input))
        else:
            messages += _messages(self.input)
        form = self.text.format if self.text is not None else None
        return ChatRequest(
            messages=messages,
            tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or [])],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(form),
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            structured_outputs=self.structured_outputs,
        )


def _messages(items: list[Item]) -> list[Message]:
    """Messages of the items; reasoning and calls of one turn become one assistant message."""
    messages: list[Message] = []
    reasoning: str | None = None

    def assistant() -> Message:
        """The assistant's message that is being put together."""
        nonlocal reasoning
        last = messages[-1] if messages else None
        if last is None or last.role != "assistant" or reasoning is not None:
            last = Message("assistant", "", reasoning=reasoning)
            messages.append(last)
            reasoning = None
        return last

    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else item.summary or []
            reasoning = "".join(part.text or "" for part in parts)
        elif item.type == "function_call":
            if not item.name:
                raise FieldError(f"{where} is a function_call without a name", f"{where}.name")
            message = assistant()
            message.tool_calls = [
                *(message.tool_calls or []), ToolCall(CalledFunction(item.name, item.arguments), item.call_id or item.id)
            ]  # fmt: skip
        elif item.type == "function_call_output":
            messages.append(Message("tool", "" if item.output is None else item.output, tool_call_id=item.call_id))
        elif item.type == "message" and item.role == "assistant":
            last = messages[-1] if messages else None
            # The text of a turn stands in front of its calls; behind calls it is a turn of its own.
            if reasoning is not None or last is None or last.role != "assistant" or last.content or last.tool_calls:
                messages.append(Message("assistant", item.content or "", reasoning=reasoning))
                reasoning = None
            else:
                last.content = item.content or ""
        elif item.type == "message" and item.role is not None:
            messages.append(Message(item.role, item.content))
        else:
            raise FieldError(
                f"{where} has type {item.type!r}{'' if item.role else ' and no role'}; allowed: message, function_call, "
                "function_call_output, reasoning",
                where,
            )
    return messages


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function without the envelope that chat requests put around it."""
    if tool.get("type") != "function":
        raise FieldError(f"{where} has type {str(tool.get('type'))[:40]!r}; this server knows function only", where)
    if isinstance(tool.get("function"), dict):
        return tool
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format`, whose schema has no envelope here."""
    if form is None or form.get("type") != "json_schema" or "json_schema" in form:
        return form
    return {
        "type": "json_schema",
        "json_schema": {key: form[key] for key in ("name", "schema", "strict") if key in form},
    }
