"""POST /v1/responses: items and their events, over the same engine as chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from perilune.http.errors import APIError, json_response
from perilune.serve.api.answers import WholeAnswer
from perilune.serve.api.context import Context
from perilune.serve.api.envelope import as_api_error
from perilune.serve.api.exchange import Exchange
from perilune.serve.api.generate import collect
from perilune.serve.api.logs import request_id
from perilune.serve.api.protocol import sampling_params
from perilune.serve.api.responses_protocol import ResponsesRequest
from perilune.serve.api.sse import HEARTBEAT, EventStream, event, unless_disconnected
from perilune.serve.request import Delta, SamplingParams, TokenLogprob, Usage


class Responses:
    """The endpoint."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def create(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        context = self._context
        asked = await context.read(request, ResponsesRequest)
        context.check_model(asked.model)
        params = sampling_params(
            asked, context_length=context.engine.context_length, max_choices=1,
            default_max_tokens=context.limits.default_max_tokens, most_tokens=context.limits.output_tokens,
        )  # fmt: skip
        chat = asked.chat()
        messages, options, service = chat.conversation(), chat.options(), asked.service(request_id(request.scope))
        exchange = await context.exchange(
            request, lambda: context.engine.chat(messages, params, 1, options, service), 1, stream=bool(asked.stream)
        )
        head = self._head(asked, params)
        if asked.stream:
            return EventStream(self._events(exchange, head), exchange.close, context.limits.client_seconds)
        try:
            answers = await unless_disconnected(collect(exchange, 1), request.receive)
        finally:
            exchange.close()
        if answers is None:
            raise ClientDisconnect
        output = Output(self._context)
        output.take(answers[0])
        output.end(answers[0].finish_reason)
        return json_response(head | output.closing(exchange.job.usage))

    def _head(self, asked: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
        """What every state of the response says."""
        return {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "model": self._context.engine.name, "status": "in_progress", "error": None, "incomplete_details": None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens, "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None}, "store": False,
            "temperature": params.temperature, "top_p": params.top_p,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto", "tools": asked.tools or [], "truncation": "disabled",
            "usage": None, "user": asked.user, "metadata": asked.metadata or {},
        }  # fmt: skip

    async def _events(self, exchange: Exchange, head: dict[str, Any]) -> AsyncIterator[bytes]:
        number = 0

        def say(kind: str, **value: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1} | value, kind)

        yield say("response.created", response=head)
        yield say("response.in_progress", response=head)
        output = Output(self._context)
        reason = None
        try:
            async for delta in exchange.deltas(self._context.limits.heartbeat_seconds):
                if delta is None:
                    yield HEARTBEAT
                    continue
                reason = delta.finish_reason or reason
                for kind, value in output.take(delta):
                    yield say(kind, **value)
        except Exception as error:
            failure: APIError = as_api_error(error)
            code = failure.code or "server_error"
            yield say("error", code=code, message=failure.message, param=failure.param)
            failed = head | output.closing(exchange.job.usage) | {"status": "failed"}
            yield say("response.failed", response=failed | {"error": {"code": code, "message": failure.message}})
            if failure.status == 500:
                raise
            return
        for kind, value in output.end(reason):
            yield say(kind, **value)
        whole = head | output.closing(exchange.job.usage)
        yield say(f"response.{whole['status']}", response=whole)


Event = tuple[str, dict[str, Any]]


@dataclass
class _Open:
    """The item that is being written."""

    kind: str
    index: int
    item: dict[str, Any]
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Output:
    """Output items of one response; what is added comes back as events.

    One item is open at a time; the next one closes it. A text without a character makes no item.
    """

    def __init__(self, context: Context) -> None:
        self._words = context.words
        self._items: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._calls: dict[int, _Open] = {}
        self._incomplete = False

    def take(self, new: Delta | WholeAnswer) -> list[Event]:
        """Add text; returns the events that say so."""
        events: list[Event] = []
        if new.reasoning:
            events += self._text("reasoning", new.reasoning, [])
        if new.text or new.logprobs:
            events += self._text("message", new.text, list(new.logprobs))
        calls = new.calls.values() if isinstance(new.calls, dict) else new.calls
        for call in calls:
            if call.position not in self._calls:
                events += self._close()
                item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "name": call.name,
                        "arguments": "", "status": "in_progress"}  # fmt: skip
                self._calls[call.position] = self._begin("function_call", item)
                events.append(("response.output_item.added", self._place() | {"item": dict(item)}))
            one = self._calls[call.position]
            one.text += call.arguments
            if call.arguments:
                where = {"item_id": one.item["id"], "output_index": one.index}
                events.append(("response.function_call_arguments.delta", where | {"delta": call.arguments}))
        return events

    def end(self, reason: str | None) -> list[Event]:
        """No more text; returns the last events."""
        self._incomplete = reason == "length"
        return self._close(cut=self._incomplete)

    def closing(self, usage: Usage) -> dict[str, Any]:
        """What the finished response says."""
        return {
            "status": "incomplete" if self._incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self._incomplete else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _begin(self, kind: str, item: dict[str, Any]) -> _Open:
        self._open = _Open(kind, len(self._items), item)
        self._items.append(item)
        return self._open

    def _place(self, *, content: bool = False) -> dict[str, Any]:
        assert self._open is not None
        where = {"output_index": self._open.index}
        return where | ({"item_id": self._open.item["id"], "content_index": 0} if content else {})

    def _text(self, kind: str, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events += self._close()
            if kind == "message":
                item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": [],
                        "status": "in_progress"}  # fmt: skip
            else:
                item = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [],
                        "status": "in_progress"}  # fmt: skip
            self._begin(kind, item)
            events.append(("response.output_item.added", self._place() | {"item": item | {"content": []}}))
            events.append(("response.content_part.added", self._place(content=True) | {"part": self._part()}))
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs
        name = "output_text" if kind == "message" else "reasoning_text"
        value = self._place(content=True) | {"delta": text}
        if kind == "message":
            value["logprobs"] = self._logprobs(logprobs)
        return [*events, (f"response.{name}.delta", value)]

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open.kind == "reasoning":
            return {"type": "reasoning_text", "text": self._open.text}
        logprobs = self._logprobs(self._open.logprobs)
        return {"type": "output_text", "text": self._open.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        return self._words.chat(logprobs)["content"] if logprobs else []

    def _close(self, *, cut: bool = False) -> list[Event]:
        """End the open item."""
        one = self._open
        if one is None:
            return []
        one.item["status"] = "incomplete" if cut else "completed"
        if one.kind == "function_call":
            one.item["arguments"] = one.text
            place = {"item_id": one.item["id"], "output_index": one.index}
            done = ("response.function_call_arguments.done", place | {"name": one.item["name"], "arguments": one.text})
            events: list[Event] = [done]
        else:
            part = self._part()
            one.item["content"] = [part]
            name = "output_text" if one.kind == "message" else "reasoning_text"
            text = self._place(content=True) | {"text": one.text}
            if one.kind == "message":
                text["logprobs"] = part["logprobs"]
            events = [
                (f"response.{name}.done", text),
                ("response.content_part.done", self._place(content=True) | {"part": part}),
            ]
        events.append(("response.output_item.done", {"output_index": one.index, "item": one.item}))
        self._open = None
        return events
