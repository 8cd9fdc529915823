"""OpenAI-style HTTP server; the only part of `serve` that needs starlette, uvicorn and msgspec (extra: serve)."""

from perilune.serve.api.app import Limits, create_app
from perilune.serve.api.server import ServerHandle, serve, serve_in_thread

__all__ = ["Limits", "ServerHandle", "create_app", "serve", "serve_in_thread"]
