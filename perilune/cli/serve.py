"""`perilune serve`: an OpenAI-style HTTP server over one run, with a chat page at /."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from perilune.cli.answer_flags import RUN_HELP, FlagParser
from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.serve.local_engine import LocalEngine

HELP = f"""usage: perilune serve --run NAME [options]

POST /v1/chat/completions and /v1/completions, GET /v1/models and /health, and a chat page at /.
One request is answered at a time; the others wait in line. Only this machine can connect unless a key is set.

{RUN_HELP}  --host ADDRESS     where to listen (default 127.0.0.1)
  --port P           0 = a free one (default 8000)
  --api-key KEY      clients must send it; may be given several times; also from PERILUNE_API_KEY
  --no-auth          let everybody who reaches a public address ask
  --context N        most tokens of a prompt and its answer together (default 8192)
  --kept-states N    states kept between requests (default 16; 0 = none)
  --json             print {{"url": …}} on stdout once it listens
"""


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = FlagParser("serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--no-auth", action="store_true")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kept-states", type=int, default=16)
    flags = parser.parse_args(args)
    if flags.help:
        print(HELP, end="")
        return 0
    if flags.context < 2 or flags.kept_states < 0:
        raise ConfigError(
            f"serve: --context {flags.context} must be at least 2 and --kept-states {flags.kept_states} 0 or more"
        )
    keys = list(flags.api_key)
    if not keys and os.environ.get("PERILUNE_API_KEY"):
        keys = [os.environ["PERILUNE_API_KEY"]]
    if keys and flags.no_auth:
        raise ConfigError("serve: --no-auth and an API key exclude each other; leave one out")
    _need_extra()
    from perilune.serve.api.server import check_exposure

    check_exposure(flags.host, tuple(keys), flags.no_auth)
    engine = parser.engine(flags, context_length=flags.context, kept_states=flags.kept_states)
    return serve_run(
        engine, host=flags.host, port=flags.port, api_keys=tuple(keys), no_auth=flags.no_auth, as_json=flags.json
    )


def serve_run(
    engine: LocalEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: tuple[str, ...] = (),
    no_auth: bool = False,
    as_json: bool = False,
) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    _need_extra()
    from perilune.serve.api import serve

    def ready(url: str) -> None:
        if as_json:
            print(json.dumps({"url": url, "model": engine.name}), flush=True)
        print(f"{engine.name}: chat page at {url}/, API at {url}/v1; Ctrl-C stops", file=sys.stderr, flush=True)

    def terminate(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # The server drains on a signal and then hands it on: both ways of asking it to stop are a normal end.
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        serve(engine, port, host=host, api_keys=api_keys, no_auth=no_auth, on_ready=ready)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _need_extra() -> None:
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name}: install perilune with the extra 'serve'"
        ) from None
