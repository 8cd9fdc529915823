"""The OpenAPI document, made from the types of requests and answers: it cannot say anything else than they do."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from perilune import __version__
from perilune.serve.api import schemas
from perilune.serve.api.chat_protocol import ChatRequest
from perilune.serve.api.information import DetokenizeRequest, TokenizeRequest
from perilune.serve.api.protocol import CompletionRequest
from perilune.serve.api.responses_protocol import ResponsesRequest


class _Operation(NamedTuple):
    path: str
    method: str
    about: str
    answer: type | str
    request: type | None = None
    streams: bool = False
    open: bool = False
    """Needs no key."""


_OPERATIONS = (
    _Operation("/v1/chat/completions", "post", "Answer a conversation.", schemas.ChatBody, ChatRequest, streams=True),
    _Operation("/v1/completions", "post", "Continue a text.", schemas.CompletionBody, CompletionRequest, streams=True),
    _Operation("/v1/responses", "post", "Answer, as items.", schemas.ResponseBody, ResponsesRequest, streams=True),
    _Operation("/v1/models", "get", "The models of this server.", schemas.ModelList),
    _Operation("/v1/models/{model}", "get", "One model.", schemas.Card),
    _Operation("/tokenize", "post", "Tokens of a text or a conversation.", schemas.TokenizeBody, TokenizeRequest),
    _Operation("/detokenize", "post", "Text of tokens.", schemas.DetokenizeBody, DetokenizeRequest),
    _Operation("/health", "get", "Whether the process is alive.", schemas.Health, open=True),
    _Operation("/ready", "get", "Whether requests are taken.", schemas.Ready, open=True),
    _Operation("/version", "get", "Of the program.", schemas.Version, open=True),
    _Operation("/metrics", "get", "Prometheus metrics.", "text/plain", open=True),
)
_REF = "#/components/schemas/{name}"


def document(model: str, *, keys: bool) -> dict[str, Any]:
    """The document of one server.

    Args:
        model: name of its model.
        keys: whether requests need an API key.
    """
    types = [kind for one in _OPERATIONS for kind in (one.answer, one.request) if isinstance(kind, type)]
    types.append(schemas.ErrorBody)
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    refs = dict(zip(types, found, strict=True))
    paths: dict[str, Any] = {}
    for one in _OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, refs, keys)
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"perilune: {model}", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        whole["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return whole


def _operation(one: _Operation, refs: dict[Any, Any], keys: bool) -> dict[str, Any]:
    if isinstance(one.answer, str):
        content: dict[str, Any] = {one.answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": refs[one.answer]}}
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "What went wrong.", "content": {"application/json": {"schema": refs[schemas.ErrorBody]}}}
    operation: dict[str, Any] = {
        "summary": one.about,
        "operationId": f"{one.method}{one.path.translate({ord(c): '_' for c in '/{}'})}",
        "responses": {"200": {"description": "Done.", "content": content}, "default": error},
    }
    if "{model}" in one.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if one.request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[one.request]}}}
    if keys and not one.open:
        operation["security"] = [{"bearer": []}]
    return operation
