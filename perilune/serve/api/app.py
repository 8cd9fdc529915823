"""The HTTP application: routes and limits. OpenAI-style, over any `Engine`."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perilune import __version__
from perilune.errors import PeriluneError
from perilune.serve.api.access import Access
from perilune.serve.api.answers import ChatShape, CompletionShape, Shape, WholeAnswer, timings_body, usage_body
from perilune.serve.api.chat_protocol import ChatRequest
from perilune.serve.api.envelope import APIError, json_response, on_error
from perilune.serve.api.protocol import CompletionRequest, Sampling, decode, sampling_params
from perilune.serve.api.sse import DONE, HEARTBEAT, EventStream, event, unless_disconnected
from perilune.serve.engine import Engine, Job
from perilune.serve.request import Delta, SamplingParams
from perilune.serve.worker import JobStream, Worker

PAGE = Path(__file__).parents[1] / "web" / "chat.html"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for.

    Attributes:
        body_bytes: largest request body.
        choices: largest `n`.
        prompts: most prompts in one completion request.
        default_max_tokens: tokens of an answer whose request does not say.
        waiting: requests that may wait or run at once.
        heartbeat_seconds: silence after which a stream sends a comment, so that proxies keep it open.
    """

    body_bytes: int = 4 * 2**20
    choices: int = 8
    prompts: int = 64
    default_max_tokens: int = 512
    waiting: int = 64
    heartbeat_seconds: float = 10.0


class _Server:
    """Endpoints over one engine and one worker thread."""

    def __init__(self, engine: Engine, limits: Limits, access: Access) -> None:
        self.engine = engine
        self.limits = limits
        self.access = access
        self.created = int(time.time())
        self.worker: Worker | None = None

    async def page(self, request: Request) -> Response:
        """GET /: the chat page. It is open; the requests that it makes are not."""
        self.access.check_site(request)
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """GET /health: the process is alive; open to everybody."""
        return json_response({"status": "ok", "version": __version__})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.engine.name,
            "object": "model",
            "created": self.created,
            "owned_by": "perilune",
            "context_length": self.engine.context_length,
        }

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model."""
        self.access.check(request)
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self.access.check(request)
        self._check_model(request.path_params["name"])
        return json_response(self._card())

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        asked, params, n = await self._read(request, ChatRequest)
        job = self.engine.chat(asked.conversation(), params, n, asked.options())
        return await self._answer(request, asked, job, ChatShape(), n)

    async def complete(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        asked, params, n = await self._read(request, CompletionRequest)
        prompts = asked.prompts()
        if len(prompts) > self.limits.prompts:
            message = f"prompt has {len(prompts)} entries; at most {self.limits.prompts} are allowed"
            raise APIError(400, message, param="prompt")
        job = self.engine.complete(prompts, params, n)
        return await self._answer(request, asked, job, CompletionShape(), n * len(prompts))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.engine.name:
            raise APIError(
                404, f"the model {name!r} is not served here; this server has {self.engine.name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def _body(self, request: Request) -> bytes:
        """The request body; refused when it grows over the limit, whatever its headers say."""
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self.limits.body_bytes:
                message = f"the body is larger than the allowed {self.limits.body_bytes} bytes"
                raise APIError(413, message, code="body_too_large", headers={"Connection": "close"})
            chunks.append(chunk)
        return b"".join(chunks)

    async def _read(self, request: Request, kind: type) -> tuple[Any, SamplingParams, int]:
        self.access.check(request)
        asked = decode(await self._body(request), kind)
        self._check_model(asked.model)
        params = sampling_params(
            asked, context_length=self.engine.context_length, default_max_tokens=self.limits.default_max_tokens,
            max_choices=self.limits.choices,
        )  # fmt: skip
        return asked, params, asked.n or 1

    async def _answer(self, request: Request, asked: Sampling, job: Job, shape: Shape, rows: int) -> ASGIApp:
        assert self.worker is not None, "the application has not been started"
        stream = self.worker.submit(job)
        head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.engine.name}
        if asked.stream:
            include_usage = asked.stream_options is not None and asked.stream_options.include_usage
            return EventStream(self._events(stream, head, shape, rows, include_usage), stream.release)
        try:
            choices = await unless_disconnected(_collect(stream, shape, rows), request.receive)
        finally:
            stream.release()
        if choices is None:
            raise ClientDisconnect
        head |= {"object": shape.object, "choices": choices}
        return json_response(head | {"usage": usage_body(job.usage), "timings": timings_body(job.timing)})

    async def _events(
        self, stream: JobStream, head: dict[str, Any], shape: Shape, rows: int, include_usage: bool
    ) -> AsyncIterator[bytes]:
        head = head | {"object": shape.chunk_object}
        no_usage = {"usage": None} if include_usage else {}
        for choice in map(shape.first_chunk, range(rows)):
            if choice is not None:
                yield event(head | {"choices": [choice]} | no_usage)
        async for delta in _deltas(stream, rows, self.limits.heartbeat_seconds):
            yield HEARTBEAT if delta is None else event(head | {"choices": [shape.chunk(delta)]} | no_usage)
        if include_usage:
            job = stream.job
            yield event(head | {"choices": [], "usage": usage_body(job.usage), "timings": timings_body(job.timing)})
        yield DONE


async def _deltas(stream: JobStream, rows: int, heartbeat: float | None) -> AsyncIterator[Delta | None]:
    """A job's text until every answer has ended, None for each silence.

    What the job does after its last text (it keeps its states) is not waited for.
    """
    unfinished = rows
    while unfinished and (deltas := await stream.next(heartbeat)) is not None:
        for delta in deltas:
            if delta.finish_reason is not None:
                unfinished -= 1
                stream.answered = unfinished == 0
            yield delta
        if not deltas:
            yield None


async def _collect(stream: JobStream, shape: Shape, rows: int) -> list[dict[str, Any]]:
    answers = [WholeAnswer() for _ in range(rows)]
    async for delta in _deltas(stream, rows, None):
        if delta is not None:
            answers[delta.row].add(delta)
    return [shape.choice(row, answer) for row, answer in enumerate(answers)]


def create_app(
    engine: Engine,
    *,
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """The application.

    Args:
        engine: answers the requests; used by one worker thread, which lives as long as the application runs.
        limits: see `Limits`.
        api_keys: bearer keys; empty = everybody who reaches the port may ask.
        hosts: names in the Host header that are answered; None = all.
    """
    limits = limits or Limits()
    server = _Server(engine, limits, Access(api_keys, hosts))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.worker = Worker(limits.waiting)
        try:
            yield
        finally:
            server.worker.shutdown()

    expected = (HTTPException, ClientDisconnect, APIError, PeriluneError, Exception)
    return Starlette(
        routes=[
            Route("/", server.page, methods=["GET"]),
            Route("/health", server.health, methods=["GET"]),
            Route("/v1/models", server.models, methods=["GET"]),
            Route("/v1/models/{name:path}", server.model, methods=["GET"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.complete, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(expected, on_error),
        lifespan=lifespan,
    )
