"""OpenAI-style HTTP server; the only part of `serve` that needs starlette, uvicorn and msgspec (extra: serve)."""

from perilune.serve.api.app import create_app
from perilune.serve.api.limits import Limits
from perilune.serve.api.server import Endpoint, ServerHandle, serve, serve_in_thread

__all__ = ["Endpoint", "Limits", "ServerHandle", "create_app", "serve", "serve_in_thread"]
