"""From a conversation to prompt ids (architecture §10.2).

The order: tool declaration, thinking effort, the messages, tool choice, response format, the opening of the next
assistant message. Thinking is kept for every assistant turn, also where it is empty, and thinking and not thinking
differ only in the tag that the prompt leaves open. There is no BOS and no white space between elements.

So the prompt of a conversation is the beginning of the prompt of its continuation, id for id: what an engine cached
stays valid. The one exception is inside a run of tool results, which are put in the order of their calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from perilune.errors import RequestError
from perilune.tokenizer.interface import Tokenizer
from perilune.tokenizer.xtml.markup import END_OF_MSG, Image, Segment, Video, close_tag, encode_each, open_tag
from perilune.tokenizer.xtml.media import MEDIA_PAD, Images, Videos, check_sizes, replaced
from perilune.tokenizer.xtml.messages import Call, Message, checked_text, read_messages, read_tools, tool_names
from perilune.tokenizer.xtml.options import OptionMessage, global_options, one_shot_options, tool_declaration
from perilune.tokenizer.xtml.template import DEFAULT, Wording
from perilune.tokenizer.xtml.tool_results import in_call_order


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where the embeddings of an image, or of one chunk of a video, go.

    Attributes:
        place: which image or video of the conversation.
        chunk: which chunk of the video; 0 for an image.
        start: index of the first pad among the ids.
        tokens: how many pads.
    """

    place: Image | Video
    chunk: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt.

    Attributes:
        ids: token ids.
        message_ends: for each message, in the order in which they stand (tool results in call order), how many ids
            there are up to its end. Option messages are not counted. Good boundaries for a prefix cache: the last one
            does not depend on one-shot options.
        loss_mask: for each id whether an assistant wrote it: True from behind the tag that a generation prompt leaves
            open to `<|end_of_msg|>`. False for everything else, and for `json` blocks, which no model may write.
        media: where embeddings go, in the order of the ids.
    """

    ids: list[int]
    message_ends: list[int]
    loss_mask: list[bool]
    media: list[MediaSpan]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    images: Images = (),
    videos: Videos = (),
    add_generation_prompt: bool = True,
    wording: Wording = DEFAULT,
) -> Rendered:
    """Prompt ids of a conversation.

    Args:
        tokenizer: whose ids.
        messages: see `perilune.tokenizer.xtml.messages.read_messages`.
        tools: tools of the whole conversation, `{"type": "function", "function": {…}}` each.
        thinking: keep the think channel of every assistant turn and leave it open at the end; otherwise drop thinking
            and leave the response channel open.
        effort: one of low, high, max; None says nothing about it.
        tool_choice: None, "auto", "none", "required" or a named function (see `options.one_shot_options`).
        response_format: None or `{"type": "text" | "json_object" | "json_schema", …}`.
        images: width and height as uploaded, and number of embeddings, of each image part in message order.
        videos: width, height and chunks (seconds, number of embeddings) of each video part in message order.
        add_generation_prompt: append the opening of the next assistant message.
        wording: texts of the option messages.

    Raises:
        RequestError: with the place of what is wrong; a tokenizer without media tokens for messages with images.
    """
    prompt = _conversation(
        messages, tools=tools, thinking=thinking, effort=effort, tool_choice=tool_choice,
        response_format=response_format, add_generation_prompt=add_generation_prompt, wording=wording,
    )  # fmt: skip
    return _encode(tokenizer, prompt, images, videos)


def conversation_segments(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    wording: Wording = DEFAULT,
) -> list[Segment]:
    """The prompt as markers, text pieces and media places; arguments and errors as `render`."""
    return _conversation(
        messages, tools=tools, thinking=thinking, effort=effort, tool_choice=tool_choice,
        response_format=response_format, add_generation_prompt=add_generation_prompt, wording=wording,
    ).segments  # fmt: skip


@dataclass(slots=True)
class _Prompt:
    """Segments, for each whether an assistant wrote it, and how many there are at the end of each message."""

    segments: list[Segment] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, segments: Iterable[Segment], *, written: bool = False) -> None:
        pieces = [segment for segment in segments if segment != ""]
        self.segments += pieces
        self.written += [written] * len(pieces)


def _conversation(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    thinking: bool,
    effort: str | None,
    tool_choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    wording: Wording,
) -> _Prompt:
    history = read_messages(messages)
    declared = [] if tools is None else read_tools(tools, "tools")
    names = tool_names([*declared, *(tool for message in history for tool in message.tools or ())])
    before = global_options(declared, effort, thinking=thinking, wording=wording)
    behind = one_shot_options(tool_choice, response_format, tool_names=names, wording=wording)
    prompt = _Prompt()
    for option in before:
        _add_option(prompt, option)
    for message, index in in_call_order(history):
        if message.role == "assistant":
            _add_assistant(prompt, message, thinking=thinking)
        elif message.tools is not None:
            _add_option(prompt, tool_declaration(message.tools, wording, f"{message.where}.tools", added=True))
        else:
            name = {"name": message.name} if message.name else {}
            if message.role == "tool":
                name = {"tool": message.name or "", "index": str(index)}
            prompt.add(open_tag("message", {"role": message.role} | name))
            prompt.add([*message.content, *close_tag("message"), END_OF_MSG])
        prompt.ends.append(len(prompt.segments))
    for option in behind:
        _add_option(prompt, option)
    if add_generation_prompt:
        prompt.add(open_tag("message", {"role": "assistant"}))
        prompt.add(open_tag("think" if thinking else "response"))
    return prompt


def _add_option(prompt: _Prompt, option: OptionMessage) -> None:
    prompt.add(open_tag("message", {"role": "system", "type": option.type}))
    prompt.add([option.body, *close_tag("message"), END_OF_MSG])


def _add_assistant(prompt: _Prompt, message: Message, *, thinking: bool) -> None:
    name = {"name": message.name} if message.name else {}
    prompt.add(open_tag("message", {"role": "assistant"} | name))
    if thinking:
        prompt.add(open_tag("think"))
        prompt.add([message.reasoning, *close_tag("think"), *open_tag("response")], written=True)
    else:
        prompt.add(open_tag("response"))
    prompt.add([*message.content, *close_tag("response")], written=True)
    if message.calls:
        prompt.add(open_tag("tools"), written=True)
        for index, call in enumerate(message.calls, 1):
            _add_call(prompt, call, index, message.where)
        prompt.add(close_tag("tools"), written=True)
    prompt.add([*close_tag("message"), END_OF_MSG], written=True)


def _add_call(prompt: _Prompt, call: Call, index: int, where: str) -> None:
    prompt.add(open_tag("call", {"tool": call.name, "index": str(index)}), written=True)
    if isinstance(call.arguments, str):
        prompt.add([*open_tag("json", {"type": "object"}), call.arguments, *close_tag("json")])
    else:
        for key, value in call.arguments.items():
            place = f"{where}.tool_calls[{index - 1}].function.arguments[{key!r}]"
            kind, text = typed(value, place)
            prompt.add(
                [*open_tag("argument", {"key": checked_text(key, place), "type": kind}), text, *close_tag("argument")],
                written=True,
            )
    prompt.add(close_tag("call"), written=True)


def typed(value: Any, where: str = "the argument") -> tuple[str, str]:
    """Type and text of a tool call's argument: strings raw, everything else as JSON with `, ` and `: `.

    Raises:
        RequestError: a value that JSON does not know, or a text with a lone surrogate.
    """
    if isinstance(value, str):
        return "string", checked_text(value, where)
    kind = next((kind for kind, classes in _TYPES if isinstance(value, classes)), None)
    if kind is None:
        raise RequestError(f"{where} is of type {type(value).__name__}, which JSON does not know")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}") from None
    return kind, checked_text(text, where)


_TYPES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("boolean", bool),  # before number: a bool is an int
    ("null", type(None)),
    ("number", (int, float)),
    ("object", dict),
    ("array", (list, tuple)),
)


def _encode(tokenizer: Tokenizer, prompt: _Prompt, images: Images, videos: Videos) -> Rendered:
    places = [segment for segment in prompt.segments if isinstance(segment, (Image, Video))]
    if places and MEDIA_PAD.name not in tokenizer.special.ids:
        raise RequestError(f"this tokenizer has no {MEDIA_PAD.name}, so its model cannot read images; send text only")
    check_sizes(places, images, videos)
    groups = [replaced(segment, images, videos) for segment in prompt.segments]
    each = iter(encode_each(tokenizer, [piece for group in groups for piece in group]))
    ids: list[int] = []
    mask: list[bool] = []
    offsets = [0]
    media: list[MediaSpan] = []
    for segment, written, group in zip(prompt.segments, prompt.written, groups):
        chunk = 0
        for piece, run in groupby(group):
            start = len(ids)
            ids += [token_id for _ in run for token_id in next(each)]
            if piece == MEDIA_PAD and isinstance(segment, (Image, Video)):
                media.append(MediaSpan(segment, chunk, start, len(ids) - start))
                chunk += 1
        mask += [written] * (len(ids) - len(mask))
        offsets.append(len(ids))
    return Rendered(ids, [offsets[end] for end in prompt.ends], mask, media)
