"""A chat request as clients send it: messages, tools, and what else the OpenAI API knows about an answer.

Types are checked here, and what the API itself forbids; what the chat format or a grammar cannot express is refused by
the engine, with the same kind of error.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perilune.serve.api.content import Part, plain_content
from perilune.serve.api.protocol import Sampling
from perilune.serve.request import ChatOptions, FieldError


class CalledFunction(msgspec.Struct):
    """Name and JSON arguments of a call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """A call that an earlier answer made."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[dict[str, Any]] | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as the chat renderer takes it; `where` is its path for error messages."""
        content: Any = self.content
        if content is None and not self.tool_calls and not (self.role == "system" and self.tools):
            raise FieldError(f"{where}.content is missing; give a string or a list of parts", f"{where}.content")
        if isinstance(content, list):
            content = plain_content(content, f"{where}.content")
        optional = {
            "name": self.name,
            "reasoning": self.reasoning_content or self.reasoning,
            "tool_calls": msgspec.to_builtins(self.tool_calls),
            "tool_call_id": self.tool_call_id,
            "tools": self.tools,
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | {key: value for key, value in optional.items() if value}


class ChatRequest(Sampling, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    store: bool | None = None

    def unsupported(self) -> list[tuple[str, bool]]:
        """See `Sampling.unsupported`."""
        return [
            ("functions", bool(self.functions)),
            ("function_call", self.function_call not in (None, "none", "auto")),
            ("modalities", self.modalities not in (None, ["text"])),
            ("audio", self.audio is not None),
            ("prediction", self.prediction is not None),
        ]

    def alternatives(self) -> int | None:
        """See `Sampling.alternatives`."""
        if not self.logprobs:
            if self.top_logprobs:
                raise FieldError("top_logprobs needs logprobs: true", "top_logprobs")
            return None
        return self.top_logprobs or 0

    def token_limit(self) -> tuple[str, int | None]:
        """The newer name wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as the chat renderer takes them."""
        if not self.messages:
            raise FieldError("messages is empty; give at least one message", "messages")
        return [message.plain(f"messages[{index}]") for index, message in enumerate(self.messages)]

    def options(self) -> ChatOptions:
        """What the request says besides its messages and how it is sampled.

        Raises:
            FieldError: a tool, a choice or a format of another form than the API's.
        """
        tools = self.tools or []
        names = [_tool_name(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise FieldError(
                    f"tools[{index}] has the name {name!r} of an earlier tool", f"tools[{index}].function.name"
                )
        choice = "auto" if self.tool_choice is None else self.tool_choice
        if isinstance(choice, dict):
            function = choice.get("function")
            if choice.get("type", "function") != "function" or not isinstance(function, dict):
                raise FieldError(
                    f'tool_choice is {str(choice)[:80]}; give {{"type": "function", "function": {{"name": …}}}}, "auto", '
                    '"none" or "required"',
                    "tool_choice",
                )
        if self.form() is not None and (self.response_format or {}).get("type", "text") != "text":
            raise FieldError("structured_outputs and response_format exclude each other", "structured_outputs")
        thinking, effort = self._thinking()
        return ChatOptions(
            tools=tools,
            tool_choice=choice,
            response_format=self.response_format,
            thinking=thinking,
            effort=effort,
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )

    def _thinking(self) -> tuple[bool | None, str | None]:
        """Whether to think, and how much: "none" is the effort of not thinking at all."""
        thinking: bool | None = None
        for key in ("thinking", "enable_thinking"):  # both names are in use
            value = (self.chat_template_kwargs or {}).get(key)
            if value is not None and not isinstance(value, bool):
                raise FieldError(f"chat_template_kwargs.{key}={value!r} must be true or false", "chat_template_kwargs")
            thinking = thinking if value is None else value
        if self.reasoning_effort == "none":
            return False, None
        return thinking, self.reasoning_effort


def _tool_name(tool: dict[str, Any], where: str) -> str:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise FieldError(
            f'{where} is {str(tool)[:80]}; give {{"type": "function", "function": {{"name": …, "parameters": …}}}}',
            where,
        )
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not name:
        raise FieldError(f"{where}.function.name={name!r} must be a text that is not empty", f"{where}.function.name")
    if not isinstance(strict, bool | None):
        raise FieldError(f"{where}.function.strict={strict!r} must be true or false", f"{where}.function.strict")
    if not isinstance(function.get("parameters"), dict | None):
        raise FieldError(f"{where}.function.parameters must be a JSON schema object", f"{where}.function.parameters")
    return name
