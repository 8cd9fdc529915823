"""What the server says about itself, and tokens of a text: pages, health, models, version, metrics, tokenize."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from perilune import __version__
from perilune.http.errors import APIError, json_response
from perilune.serve.api.chat_protocol import ChatRequest, Message
from perilune.serve.api.context import Context
from perilune.serve.request import FieldError

PAGE = Path(__file__).parents[1] / "web" / "chat.html"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Information:
    """The endpoints that run no model."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def page(self, request: Request) -> Response:
        """GET /: the chat page. It is open; the requests that it makes are not."""
        self._context.access.check_site(request)
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """GET /health: the process is alive, and so is its engine, though it may be warming up; open to everybody."""
        self._context.check_alive()
        return json_response({"status": "ok", "version": __version__})

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests are taken and answered; open to everybody."""
        self._context.check_ready()
        return json_response({"status": "ready", "active": len(self._context.exchanges)})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in the Prometheus text format; needs no key, as scrapers have none."""
        self._context.access.check_site(request)
        body, kind = await asyncio.to_thread(self._context.metrics.text)  # it waits for the engine's step
        return Response(body, headers={"Content-Type": kind})

    def _card(self) -> dict[str, Any]:
        engine = self._context.engine
        return {
            "id": engine.name, "object": "model", "created": self._context.created, "owned_by": "perilune",
            "context_length": engine.context_length, "max_model_len": engine.context_length,
            "thinking": engine.thinking, "images": engine.takes_images,
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model."""
        self._context.access.check(request)
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._context.access.check(request)
        self._context.check_model(request.path_params["name"])
        return json_response(self._card())

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        asked = await self._context.read(request, TokenizeRequest)
        self._context.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise FieldError("give either prompt or messages", "prompt")
        words, engine = self._context.words, self._context.engine
        if asked.messages is None:
            text = asked.prompt or ""
            ids = await self._context.prepare(lambda: words.tokenizer.encode(text))
        else:
            chat = ChatRequest(messages=asked.messages, tools=asked.tools)
            messages, options = chat.conversation(), chat.options()
            ids = await self._context.prepare(
                lambda: engine.prompt_ids(messages, options, add_generation_prompt=asked.add_generation_prompt)
            )
        body: dict[str, Any] = {"count": len(ids), "max_model_len": engine.context_length, "tokens": ids}
        if asked.return_token_strs:
            body["token_strs"] = [words.text(token_id) for token_id in ids]
        return json_response(body)

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: asked by evaluation clients. No text spells a control token, so none is named."""
        self._context.access.check(request)
        tokenizer = self._context.words.tokenizer
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
        return json_response({"tokenizer_class": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size} | names)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: control tokens are written by name."""
        asked = await self._context.read(request, DetokenizeRequest)
        self._context.check_model(asked.model)
        tokenizer = self._context.words.tokenizer
        for place, token_id in enumerate(asked.tokens):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise APIError(
                    400,
                    f"tokens[{place}]={token_id}; this model's ids are 0..{tokenizer.vocab_size - 1}",
                    param="tokens",
                )
        return json_response({"prompt": tokenizer.decode(asked.tokens, skip_special=False)})
