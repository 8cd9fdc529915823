"""`perilune serve`: an OpenAI-style HTTP server over one run, with a chat page at /."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli.answer_flags import RUN_HELP, FlagParser
from perilune.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from perilune.serve.api import Endpoint, Limits
    from perilune.serve.engine import Engine

HELP = f"""usage: perilune serve --run NAME [options]

POST /v1/chat/completions, /v1/completions and /v1/responses, GET /v1/models, /ready and /metrics, and a chat page at /.
Only this machine can connect unless a key is set. SIGTERM or Ctrl-C lets running answers end; a second one does not.

{RUN_HELP}  --host ADDRESS     where to listen (default 127.0.0.1)
  --port P           0 = a free one (default 8000)
  --api-key KEY      clients must send it; may be given several times; also from PERILUNE_API_KEY
  --no-auth          let everybody who reaches a public address ask
  --context N        most tokens of a prompt and its answer together (default 8192)
  --cache-bytes N    memory of the prefix cache and of what runs (default: 256 MiB; on a GPU 60 % of what is free)
  --max-running N    answers that are drawn at once (default 64)
  --max-queue N      requests that may wait or run at once; more get 429 (default 256)
  --admin-port P     pause, abort, look into the cache, change weights; this machine only (default: none)
  --json             print {{"url": …}} on stdout once it listens
  --help-all         limits, logs, and what the cache keeps
"""

MORE_HELP = """
Limits and logs
  --max-output-tokens N  most tokens of any answer (default: as many as fit)
  --max-body BYTES       largest request body (default 16777216)
  --request-timeout S    seconds for a whole answer (default: no end)
  --drain-seconds S      how long running answers may go on after SIGTERM (default 30)
  --admin-key KEY        the admin port needs it; also from PERILUNE_ADMIN_KEY
  --log-json             one JSON object a line in the log

Cache
  --no-prefix-cache      compute every prompt from its beginning
  --retention R          where states are kept: dense, tail, turns, second-hit, interval:N, several joined by +
                         (default turns+second-hit)
  --host-cache N         bytes of the host's memory for what the cache gives up (default 0)
  --disk-cache DIR       folder for what does not fit there either; the next server finds it again
  --disk-cache-bytes N   most bytes in it (default 17179869184)

Speed
  --patience X           how long a short prompt may wait for a piece of a long one, in times of its own step: more makes
                         long prompts faster while short ones come (default 1.75)
  --cuda-graphs WHICH    passes that are recorded on a GPU: auto (all that can be, default), decode, off
  --warm-up HOW          full: compile and record on a GPU whatever requests can need; GET /ready says no until then, and
                         requests wait (default). fast: all but what scored prompts, pictures and prompts behind more
                         than 65536 tokens need. lazy: ready at once, and the first requests of each kind wait
  --deterministic        an answer does not depend on what else is being answered, bit by bit
"""


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = FlagParser("serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--no-auth", action="store_true")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--cache-bytes", type=int)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--retention", default="turns+second-hit")
    parser.add_argument("--host-cache", type=int, default=0)
    parser.add_argument("--disk-cache", type=Path)
    parser.add_argument("--disk-cache-bytes", type=int, default=2**34)
    parser.add_argument("--help-all", action="store_true")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--patience", type=float, default=1.75)
    parser.add_argument("--cuda-graphs", default="auto")
    parser.add_argument("--warm-up", default="full")
    parser.add_argument("--deterministic", action="store_true")
    add_server_flags(parser)
    flags = parser.parse_args(args)
    if flags.help or flags.help_all:
        print(HELP + MORE_HELP if flags.help_all else HELP, end="")
        return 0
    if flags.context < 2 or flags.max_running < 1:
        raise ConfigError(
            f"serve: --context {flags.context} must be at least 2 and --max-running {flags.max_running} at least 1"
        )
    keys = list(flags.api_key)
    if not keys and os.environ.get("PERILUNE_API_KEY"):
        keys = [os.environ["PERILUNE_API_KEY"]]
    if keys and flags.no_auth:
        raise ConfigError("serve: --no-auth and an API key exclude each other; leave one out")
    _need_extra()
    from perilune.http.exposure import check_exposure

    check_exposure(flags.host, tuple(keys), flags.no_auth)
    endpoint, limits = server_options(flags, tuple(keys))
    from perilune.serve.settings import EngineSettings

    settings = EngineSettings(
        cache_bytes=flags.cache_bytes, prefix_cache=not flags.no_prefix_cache, retention=flags.retention,
        sequences=flags.max_running, deterministic=flags.deterministic, host_bytes=flags.host_cache,
        disk=flags.disk_cache, disk_bytes=flags.disk_cache_bytes, patience=flags.patience, warm_up=flags.warm_up,
        cuda_graphs=flags.cuda_graphs,
    )  # fmt: skip
    engine = parser.engine(flags, context_length=flags.context, settings=settings)
    try:
        code = serve_run(engine, endpoint, limits, as_json=flags.json, log_json=flags.log_json)
        engine.close(None)  # however long the disk takes
    except BaseException:  # a second signal, at whichever time
        engine.close(keep=False)
        raise
    return code


def add_server_flags(parser: FlagParser) -> None:
    """Flags of the HTTP server that say nothing about the model."""
    parser.add_argument("--max-output-tokens", type=int)
    parser.add_argument("--max-queue", type=int, default=256)
    parser.add_argument("--max-body", type=int, default=16 * 2**20)
    parser.add_argument("--request-timeout", type=float)
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument("--admin-port", type=int)
    parser.add_argument("--admin-key", action="append", default=[])
    parser.add_argument("--log-json", action="store_true")


def server_options(flags: argparse.Namespace, keys: tuple[str, ...]) -> tuple[Endpoint, Limits]:
    """What the flags say about addresses and limits.

    Raises:
        ConfigError: a limit that nothing could keep.
    """
    from perilune.serve.api import Endpoint, Limits

    admin_keys = list(flags.admin_key)
    if not admin_keys and os.environ.get("PERILUNE_ADMIN_KEY"):
        admin_keys = [os.environ["PERILUNE_ADMIN_KEY"]]
    if flags.admin_key and flags.admin_port is None:
        raise ConfigError(
            "serve: --admin-key is of the admin port, and there is none; give --admin-port P, or leave it out"
        )
    if not flags.drain_seconds >= 0:
        raise ConfigError(f"serve: --drain-seconds {flags.drain_seconds:g} must be 0 or more")
    endpoint = Endpoint(
        host=flags.host, port=flags.port, api_keys=keys, no_auth=flags.no_auth, admin_port=flags.admin_port,
        admin_keys=tuple(admin_keys), drain_seconds=flags.drain_seconds,
    )  # fmt: skip
    limits = Limits(
        output_tokens=flags.max_output_tokens, waiting=flags.max_queue, body_bytes=flags.max_body,
        request_seconds=flags.request_timeout,
    )  # fmt: skip
    return endpoint, limits


def serve_run(
    engine: Engine,
    endpoint: Endpoint | None = None,
    limits: Limits | None = None,
    *,
    as_json: bool = False,
    log_json: bool = False,
) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    _need_extra()
    from perilune.serve.api import serve
    from perilune.serve.api.logs import JsonFormatter

    def ready(url: str, admin_url: str | None) -> None:
        if as_json:
            admin = {} if admin_url is None else {"admin_url": admin_url}
            print(json.dumps({"url": url, "model": engine.name} | admin), flush=True)
        more = "" if admin_url is None else f", admin at {admin_url}"
        now = engine.metrics()
        pool = f"{now.pages_total * now.page_bytes / 2**20:,.0f} MiB in {now.pages_total:,} pages"
        print(
            f"{engine.name}: answers of up to {engine.context_length:,} tokens; cache and running requests share {pool}\n"
            f"{engine.name}: chat page at {url}/, API at {url}/v1{more}; Ctrl-C stops", file=sys.stderr, flush=True,
        )  # fmt: skip

    if log_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    serve(engine, endpoint, limits=limits, on_ready=ready)
    return 0


def serve_page(engine: Engine, port: int) -> int:
    """Serve to this machine until Ctrl-C; returns the exit code."""
    _need_extra()
    from perilune.serve.api import Endpoint

    return serve_run(engine, Endpoint(port=port))


def _need_extra() -> None:
    try:
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name}: install perilune with the extra 'serve'"
        ) from None
