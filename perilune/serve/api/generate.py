"""POST /v1/chat/completions and /v1/completions: whole answers and streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from perilune.http.errors import APIError, json_response
from perilune.serve.api.answers import (  # fmt: skip
    ChatShape,
    CompletionShape,
    Echo,
    Shape,
    Shown,
    WholeAnswer,
    timings_body,
    usage_body,
)
from perilune.serve.api.chat_protocol import ChatRequest
from perilune.serve.api.context import Context
from perilune.serve.api.exchange import Exchange
from perilune.serve.api.logs import request_id
from perilune.serve.api.protocol import CompletionRequest, Sampling, sampling_params
from perilune.serve.api.sse import DONE, HEARTBEAT, EventStream, event, unless_disconnected
from perilune.serve.request import SamplingParams


class Generate:
    """The two endpoints."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        asked = await self._context.read(request, ChatRequest)
        params = self.params(asked)
        n = asked.n or 1
        messages, options, service = asked.conversation(), asked.options(), asked.service(request_id(request.scope))
        engine = self._context.engine
        exchange = await self._context.exchange(
            request, lambda: engine.chat(messages, params, n, options, service), n, stream=bool(asked.stream)
        )
        return await self._answer(request, asked, exchange, ChatShape(self._shown(asked)), n)

    async def complete(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        asked = await self._context.read(request, CompletionRequest)
        prompts, n = asked.prompts(), asked.n or 1
        if len(prompts) > self._context.limits.prompts:
            message = f"prompt has {len(prompts)} entries; at most {self._context.limits.prompts} are allowed"
            raise APIError(400, message, param="prompt")
        # A prompt alone can be asked for: its log-probabilities. One token is drawn, and nobody sees it.
        alone = bool(asked.echo) and asked.max_tokens == 0
        if alone:
            asked.max_tokens = 1
        params = self.params(asked)
        if asked.echo and params.logprobs is not None:
            params = replace(params, prompt_logprobs=params.logprobs)
        service, engine = asked.service(request_id(request.scope)), self._context.engine
        exchange = await self._context.exchange(
            request, lambda: engine.complete(prompts, params, n, service), n * len(prompts), stream=bool(asked.stream)
        )
        shape = CompletionShape(self._shown(asked), alone=alone)
        if not asked.echo:
            return await self._answer(request, asked, exchange, shape, n * len(prompts))

        def echo() -> None:
            shape.echoes |= self._echoes(prompts, n, exchange)

        return await self._answer(request, asked, exchange, shape, n * len(prompts), prepare=echo)

    def params(self, asked: Sampling) -> SamplingParams:
        """Checked sampling parameters of a request for this server's model."""
        self._context.check_model(asked.model)
        limits = self._context.limits
        return sampling_params(
            asked, context_length=self._context.engine.context_length, default_max_tokens=limits.default_max_tokens,
            max_choices=limits.choices, most_tokens=limits.output_tokens,
        )  # fmt: skip

    def _shown(self, asked: Sampling) -> Shown:
        return Shown(self._context.words, asked.alternatives() is not None, bool(asked.return_token_ids))

    def _echoes(self, prompts: Sequence[str | list[int]], n: int, exchange: Exchange) -> dict[int, Echo]:
        """Row -> its prompt as text, with log-probabilities if they were asked for."""
        words = self._context.words
        all_logprobs = exchange.job.prompt_logprobs
        echoes = {}
        for number, prompt in enumerate(prompts):
            ids = words.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            text = prompt if isinstance(prompt, str) else words.tokenizer.decode(ids)
            logprobs = words.echo(ids, None if all_logprobs is None else all_logprobs[number])
            echoes |= dict.fromkeys(range(number * n, number * n + n), Echo(text, logprobs))
        return echoes

    def _prompt_logprobs(self, asked: Sampling, exchange: Exchange, rows: int) -> list[dict[str, Any]]:
        """`prompt_logprobs` of every choice, if the request has asked for them."""
        found = exchange.job.prompt_logprobs
        if asked.prompt_logprobs is None or found is None:
            return [{}] * rows
        return [{"prompt_logprobs": self._context.words.prompt(found[row * len(found) // rows])} for row in range(rows)]

    async def _answer(
        self, request: Request, asked: Sampling, exchange: Exchange, shape: Shape, rows: int, *, prepare: Any = None
    ) -> ASGIApp:
        """Answer; `prepare` is called once the prompts have been run."""
        head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        head |= {"model": self._context.engine.name}
        if asked.stream:
            limits = self._context.limits
            events = self._events(exchange, asked, head, shape, rows, prepare)
            return EventStream(events, exchange.close, limits.client_seconds)
        try:
            answers = await unless_disconnected(collect(exchange, rows), request.receive)
        finally:
            exchange.close()
        if answers is None:
            raise ClientDisconnect
        if prepare is not None:
            prepare()
        more = self._prompt_logprobs(asked, exchange, rows)
        choices = [shape.choice(row, answer) | more[row] for row, answer in enumerate(answers)]
        job = exchange.job
        head |= {"object": shape.object, "choices": choices, "system_fingerprint": None}
        return json_response(head | {"usage": usage_body(shape.usage(job.usage)), "timings": timings_body(job.timing)})

    async def _events(
        self, exchange: Exchange, asked: Sampling, head: dict[str, Any], shape: Shape, rows: int, prepare: Any
    ) -> AsyncIterator[bytes]:
        options, job = asked.stream_options, exchange.job
        include, always = options and options.include_usage, options and options.continuous_usage_stats
        head = head | {"object": shape.chunk_object, "system_fingerprint": None}

        def chunk(choice: dict[str, Any]) -> bytes:
            usage = {"usage": usage_body(shape.usage(job.usage))} if always else {"usage": None} if include else {}
            return event(head | {"choices": [choice]} | usage)

        begun = {row for row in range(rows) if shape.first_chunk(row) is not None}
        for row in sorted(begun):
            yield chunk(shape.first_chunk(row) or {})
        async for delta in exchange.deltas(self._context.limits.heartbeat_seconds):
            if delta is None:
                yield HEARTBEAT
                continue
            if prepare is not None:
                prepare()
                prepare = None
            if delta.row not in begun:
                begun.add(delta.row)
                first = shape.first_chunk(delta.row)
                if first is not None:
                    yield chunk(first)
            yield chunk(shape.chunk(delta))
        if include:
            body = {"choices": [], "usage": usage_body(shape.usage(job.usage)), "timings": timings_body(job.timing)}
            yield event(head | body)
        yield DONE


async def collect(exchange: Exchange, rows: int) -> list[WholeAnswer]:
    """All answers, whole."""
    answers = [WholeAnswer() for _ in range(rows)]
    async for delta in exchange.deltas(None):
        if delta is not None:
            answers[delta.row].add(delta)
    return answers
