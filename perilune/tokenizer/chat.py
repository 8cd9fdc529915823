"""K3's chat format (XTML): from messages to prompt ids, and from output ids back to thinking and response.

An element is `<|open|>tag attr="v"<|sep|> … <|close|>tag<|sep|>`; a message ends with `<|end_of_msg|>` (architecture
§10.2). A prompt is a list of *segments*, each encoded on its own: control ids are put in by this file, everything else
(tag names, attributes, all message text) goes through `Tokenizer.encode`, which cannot produce one. A prompt is never
joined to a string and encoded again. Thinking and not thinking differ only in the tag that the prompt leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.errors import RequestError
from perilune.tokenizer.interface import StreamDecoder, Tokenizer

ROLES = ("system", "user", "assistant")
_LONGEST_TAG_IDS = 64


@dataclass(frozen=True, slots=True)
class Marker:
    """A control token in a prompt, by name."""

    name: str


Segment = str | Marker


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of streamed output: `channel` is think or response."""

    channel: str
    text: str


@dataclass(frozen=True, slots=True)
class Response:
    """A finished output.

    Attributes:
        reasoning: text of the think channel; None if there was no such channel.
        content: text of the response channel; None if the output ended while still thinking.
        finished: whether a stop id was seen (False: cut by a length limit).
        undeclared_tools: the output opened a tools channel; its text is in neither field.
    """

    reasoning: str | None
    content: str | None
    finished: bool
    undeclared_tools: bool


def chat_segments(
    messages: Sequence[Mapping[str, Any]], *, thinking: bool, add_generation_prompt: bool = True
) -> list[Segment]:
    """The prompt as text pieces and markers.

    Args:
        messages: `{"role": system|user|assistant, "content": text, "name"?: text}`; an assistant message may carry its
            thinking as `reasoning_content` or `reasoning`. Content may be a list of `{"type": "text", "text": …}` parts.
        thinking: keep the think channel of every assistant turn (empty if it has none) and leave think open at the
            end; otherwise drop thinking and leave response open.
        add_generation_prompt: append the opening of the next assistant message.

    Raises:
        RequestError: no messages, an unknown role, or content that is not text.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message with a role and content")
    out: list[Segment] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"messages[{index}].role is {role!r}; allowed: {', '.join(ROLES)}")
        name = message.get("name")
        out += _open("message", {"role": role} | ({"name": _text(name, f"messages[{index}].name")} if name else {}))
        content = _text(message.get("content"), f"messages[{index}].content")
        if role == "assistant":
            if thinking:
                reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
                out += [*_open("think"), _text(reasoning, f"messages[{index}].reasoning_content"), *_close("think")]
            out += [*_open("response"), content, *_close("response")]
        else:
            out.append(content)
        out += [*_close("message"), Marker("<|end_of_msg|>")]
    if add_generation_prompt:
        out += [*_open("message", {"role": "assistant"}), *_open("think" if thinking else "response")]
    return out


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, thinking: bool, add_generation_prompt: bool = True
) -> list[int]:
    """Prompt ids of a conversation; arguments and errors as `chat_segments`.

    Rendering a conversation and then the same conversation with more turns gives a prompt and its extension, so the
    cache of the earlier turns stays valid.
    """
    segments = chat_segments(messages, thinking=thinking, add_generation_prompt=add_generation_prompt)
    return encode_segments(tokenizer, segments)


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of segments: markers by name, text through `encode`, each segment on its own."""
    segments = list(segments)
    texts = iter(tokenizer.encode_batch([segment for segment in segments if isinstance(segment, str)]))
    ids: list[int] = []
    for segment in segments:
        ids += [tokenizer.special.ids[segment.name]] if isinstance(segment, Marker) else next(texts)
    return ids


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an assistant turn: `<|end_of_msg|>`, and `[EOS]`, which is all that a base model knows."""
    return (tokenizer.special.end_of_msg, tokenizer.special.eos)


class ResponseParser:
    """Splits an assistant's output ids into channels while they arrive (architecture §10.3, §10.4).

    Works on ids, not on text, so a model that *writes* "<|close|>" as ordinary characters changes nothing. A tag that
    is not finished by `<|sep|>` within 64 ids was not a tag: its text goes to the channel that was open.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        """`thinking` says which tag the prompt left open."""
        self._tokenizer = tokenizer
        self._stops = stop_ids(tokenizer)
        self._channel: str | None = "think" if thinking else "response"
        self._text: dict[str, str] = {self._channel: ""}
        self._stream = StreamDecoder(tokenizer)
        self._tag: list[int] | None = None
        self._closing = False
        self._finished = False
        self._tools = False

    def push(self, token_id: int) -> list[Delta]:
        """Text that became certain with this id. Ids after a stop id are ignored."""
        special = self._tokenizer.special
        if self._finished:
            return []
        if token_id in self._stops:
            self._finished = True
            return self._flush()
        if token_id in (special.open, special.close):
            deltas = self._give_up_tag() + self._flush()
            self._tag, self._closing = [], token_id == special.close
            return deltas
        if self._tag is not None:
            if token_id == special.sep:
                self._end_tag()
                return []
            self._tag.append(token_id)
            return self._give_up_tag() if len(self._tag) > _LONGEST_TAG_IDS else []
        return self._emit(self._stream.push(token_id))

    def finish(self) -> tuple[list[Delta], Response]:
        """The last text, and the whole output; an unfinished tag at the end is dropped."""
        deltas = self._flush()
        reasoning = self._text.get("think")
        response = Response(reasoning, self._text.get("response"), self._finished, self._tools)
        return deltas, response

    def _emit(self, text: str) -> list[Delta]:
        if not text or self._channel is None:
            return []
        self._text[self._channel] += text
        return [Delta(self._channel, text)]

    def _flush(self) -> list[Delta]:
        return self._emit(self._stream.finish())

    def _give_up_tag(self) -> list[Delta]:
        ids, self._tag = self._tag, None
        return self._emit("".join([self._stream.push(token_id) for token_id in ids or []]))

    def _end_tag(self) -> None:
        name = self._tokenizer.decode(self._tag or []).strip().partition(" ")[0]
        self._tag = None
        if self._closing:
            self._channel = None
        elif name in ("think", "response"):
            self._channel = name
            self._text.setdefault(name, "")
        elif name == "tools":
            self._tools, self._channel = True, None


def parse_response(tokenizer: Tokenizer, ids: Iterable[int], *, thinking: bool) -> Response:
    """Split a whole output at once."""
    parser = ResponseParser(tokenizer, thinking=thinking)
    for token_id in ids:
        parser.push(token_id)
    return parser.finish()[1]


def _open(tag: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    pieces: list[Segment] = [Marker("<|open|>"), tag]
    for key, value in (attributes or {}).items():
        pieces += [f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"']
    return [*pieces, Marker("<|sep|>")]


def _close(tag: str) -> list[Segment]:
    return [Marker("<|close|>"), tag, Marker("<|sep|>")]


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for part in value:
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise RequestError(
                    f'{where} has a part that is not text: {str(part)[:80]}; use {{"type": "text"}} parts'
                )
        return "".join(part["text"] for part in value)
    raise RequestError(f"{where} is {type(value).__name__}; give a string or a list of text parts")
