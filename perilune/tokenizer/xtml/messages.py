"""Messages as OpenAI clients send them, checked and put into one form.

Every error says where: `messages[3].content[1].image_url`. Unknown roles are refused, not dropped: a dropped message
changes what the user said. Fields that the format has no place for are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.errors import RequestError
from perilune.tokenizer.xtml.markup import Image, Segment, Video

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant message.

    Attributes:
        identity: the client's id, or None.
        name: the tool's name, not empty.
        arguments: a dictionary, or the text that was no JSON.
    """

    identity: str | None
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        where: its place for errors, as `messages[3]`.
        role: one of `ROLES`.
        name: the speaker's name, or None; of a tool result the tool's name, if the message says it.
        content: text and media places; empty strings are left out.
        reasoning: text of the think channel, "" for none.
        calls: tool calls of an assistant message.
        answers: of a tool result the id of the call it answers, or None.
        tools: tools that a system message adds; such a message has nothing else.
    """

    where: str
    role: str
    name: str | None = None
    content: tuple[Segment, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    tools: Sequence[Any] | None = None


class _MediaCount:
    def __init__(self) -> None:
        self.images = self.videos = 0


def read_messages(messages: Any) -> list[Message]:
    """Check a conversation.

    Args:
        messages: a list of mappings with a `role`: `system`, `user`, `assistant` or `tool`; `content` is text or a list
            of parts of type `text`, `image_url`/`image` or `video_url`/`video`. Optional: `name`; of an assistant
            `reasoning_content` or `reasoning`, and `tool_calls`; of a tool result `tool_call_id`, `tool` or `name`; of
            a system message `tools` instead of content.

    Raises:
        RequestError: with the place of what is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages is {_type(messages)}; give a list of messages with a role and content")
    if not messages:
        raise RequestError("messages is empty; give at least one message with a role and content")
    media = _MediaCount()
    return [_message(message, f"messages[{index}]", media) for index, message in enumerate(messages)]


def read_tools(tools: Any, where: str) -> list[Any]:
    """Check a list of tool declarations; RequestError with the place of what is wrong."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise RequestError(f"{where} is {_type(tools)}; give a list of tools")
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise RequestError(f'{place} is {_shown(tool)}; give {{"type": "function", "function": {{…}}}}')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{place}.function is {_type(function)}; give an object with a name and parameters")
        _filled(function.get("name"), f"{place}.function.name")
    return list(tools)


def tool_names(tools: Sequence[Any]) -> list[str]:
    """Names of checked tools."""
    return [tool["function"]["name"] for tool in tools]


def sorted_json(value: Any, where: str) -> str:
    """Compact JSON with the keys of every object in order and non-ASCII text as it is.

    Raises:
        RequestError: JSON cannot express the value.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}") from None
    return checked_text(text, where)


def checked_text(value: Any, where: str) -> str:
    """`value`, if it is a text that can be encoded; RequestError with its place otherwise."""
    if not isinstance(value, str):
        raise RequestError(f"{where} is {_type(value)}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} has the lone surrogate {value[error.start]!a} at character {error.start}, which is not valid "
            "Unicode; replace it"
        ) from None
    return value


def _message(message: Any, where: str, media: _MediaCount) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {_type(message)}; give an object with a role and content")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {_shown(role)}; allowed: {', '.join(ROLES)}")
    name = _optional(message, "name", where)
    if role == "system" and message.get("tools"):
        if message.get("content") or name:
            raise RequestError(
                f"{where} has tools and {'content' if message.get('content') else 'a name'}; a system message that "
                "adds tools has nothing else: put its text into a system message of its own"
            )
        return Message(where, role, tools=read_tools(message["tools"], f"{where}.tools"))
    if role == "tool":
        answers = _optional(message, "tool_call_id", where)
        name = _optional(message, "tool", where) or name
        return Message(where, role, name, _content(message, where, media), answers=answers)
    if role != "assistant":
        return Message(where, role, name, _content(message, where, media))
    content: tuple[Segment, ...] = ()
    if message.get("content") is not None:
        content = _content(message, where, media)
        if not all(isinstance(piece, str) for piece in content):
            raise RequestError(f"{where}.content has an image or video; the assistant can only write text")
    reasoning = _optional(message, "reasoning_content", where) or _optional(message, "reasoning", where) or ""
    return Message(where, role, name, content, reasoning if reasoning.strip() else "", _calls(message, where))


def _content(message: Mapping[str, Any], where: str, media: _MediaCount) -> tuple[Segment, ...]:
    content, where = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        checked_text(content, where)
        return (content,) if content else ()
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} is {_type(content)}; give a string or a list of parts")
    pieces: list[Segment] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            text = checked_text(part.get("text"), f"{place}.text")
            pieces += [text] if text else []
        elif kind in ("image_url", "image"):
            _source(part, kind, place)
            pieces.append(Image(media.images))
            media.images += 1
        elif kind in ("video_url", "video"):
            _source(part, kind, place)
            pieces.append(Video(media.videos))
            media.videos += 1
        else:
            raise RequestError(
                f"{place} is {_shown(part)}; allowed are parts of type text, image_url, image, video_url and video"
            )
    return tuple(pieces)


def _source(part: Mapping[str, Any], kind: str, where: str) -> None:
    """A `*_url` part must say where the picture is; its `image` and `video` may hold anything that was loaded already."""
    value = part.get(kind)
    if kind.endswith("_url"):
        url = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(url, str) or not url:
            raise RequestError(f'{where}.{kind} is {_shown(value)}; give {{"url": "…"}}')
    elif value is None:
        raise RequestError(f"{where}.{kind} is missing")


def _calls(message: Mapping[str, Any], where: str) -> tuple[Call, ...]:
    calls, where = message.get("tool_calls"), f"{where}.tool_calls"
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise RequestError(f"{where} is {_type(calls)}; give a list of calls")
    out: list[Call] = []
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"{place} is {_shown(call)}; give an object with a function")
        name = _filled(function.get("name"), f"{place}.function.name")
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        out.append(Call(_optional(call, "id", place), name, arguments))
    return tuple(out)


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """Arguments as a dictionary; a text that is no JSON stays a text."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        if not checked_text(arguments, where).strip():
            return {}
        try:
            value = json.loads(arguments)
        except ValueError:
            return arguments
        except RecursionError:
            raise RequestError(f"{where} is nested too deeply to be read") from None
    else:
        value = arguments
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RequestError(f"{where} is {_shown(value)}; give a JSON object, or the text of one")
    return dict(value)


def _optional(message: Mapping[str, Any], key: str, where: str) -> str | None:
    value = message.get(key)
    return None if value is None else checked_text(value, f"{where}.{key}") or None


def _filled(value: Any, where: str) -> str:
    if not checked_text(value, where):
        raise RequestError(f"{where} is empty; a tool needs a name")
    return value


def _type(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _shown(value: Any) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) <= 80 else text[:80] + "…"
