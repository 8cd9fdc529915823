"""Sandboxes over HTTP: a pool that other processes and machines use. Needs the extra `serve`."""

from __future__ import annotations

from perilune.sandbox.api.app import create_app
from perilune.sandbox.api.permissions import Permissions, ServiceLimits
from perilune.sandbox.api.server import serve, serve_in_thread

__all__ = ["Permissions", "ServiceLimits", "create_app", "serve", "serve_in_thread"]
