"""Listening on a port: in this thread until interrupted, or in another one for as long as a handle is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from perilune.http.exposure import check_exposure, host_names
from perilune.http.listening import Server, ServerThread, listen, server_config, url_of
from perilune.sandbox.api.app import create_app
from perilune.sandbox.pool import Pool


def _server(pool: Pool, host: str, grace: int, options: dict[str, Any]) -> Server:
    return Server(server_config(create_app(pool, hosts=host_names(host), **options), grace))


def serve_in_thread(
    pool: Pool, port: int = 0, *, host: str = "127.0.0.1", no_auth: bool = False, **options: Any
) -> ServerThread:
    """Serve in a thread of this process; returns once the port answers. The pool stays its maker's.

    Args:
        port: 0 takes a free one.
        options: `api_keys`, `limits`, `permissions` of `create_app`.

    Raises:
        ConfigError, CapacityError: see `check_exposure`; or the port is taken.
    """
    check_exposure(host, options.get("api_keys", ()), no_auth)
    return ServerThread(_server(pool, host, 1, options), listen(host, port), "perilune-sandbox-http")


def serve(
    pool: Pool, port: int, *, host: str = "127.0.0.1", no_auth: bool = False,
    on_ready: Callable[[str], None] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Serve in this thread until interrupted (Ctrl-C, SIGTERM); running commands get a few seconds to end.

    Args:
        on_ready: called with the URL once the socket is bound.
        options: see `serve_in_thread`.

    Raises:
        ConfigError, CapacityError: see `serve_in_thread`.
    """
    check_exposure(host, options.get("api_keys", ()), no_auth)
    with contextlib.closing(listen(host, port)) as listener:
        server = _server(pool, host, 5, options)
        if on_ready is not None:
            on_ready(url_of(listener))
        server.run(sockets=[listener])
