"""`perilune sandbox serve`: a pool of sandboxes behind HTTP, with keys, limits and a page that lists them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from perilune.cli.sandbox_sizes import size
from perilune.errors import ConfigError

HELP = """usage: perilune sandbox serve [options]

Sandboxes for other processes and machines: perilune sandbox run --url URL, RemoteSandboxes in Python, or plain HTTP. Only this machine can connect unless a key is set. Idle sandboxes are saved and hold no memory until their next use. When the service ends they lie paused in its folder, and the next one finds them; after a kill, too.

  --host ADDRESS         where to listen (default 127.0.0.1)
  --port P               0 = a free one (default 8010)
  --api-key KEY          clients must send it; may be given several times; also from PERILUNE_SANDBOX_KEY
  --no-auth              let everybody who reaches a public address use it
  --folder FOLDER        where sandboxes are kept (default $PERILUNE_SANDBOX_HOME)
  --memory SIZE          that all sandboxes may really hold (default: three quarters of what is free)
  --overcommit X         their limits together may be X times that (default 8)
  --most N               sandboxes with a machine at once (default 1000)
  --idle SECONDS         of no use until one is saved and its memory given back; 0 = never (default 300)
  --lifetime SECONDS     after which one is removed; 0 = never (default)
  --snapshots SECONDS    between recovery snapshots of sandboxes in use; 0 = none (default)
  --warm DRIVER=N        keep N default sandboxes ready; may be given again
  --allow-image FOLDER, --allow-tree FOLDER   that clients may start from, or show a guest; may be given again
  --allow-host-network   clients may ask for the host's network
  --sync none|batch|full how snapshots reach the disk (default batch)
  --store SIZE           most bytes of snapshots (default 64G)
  --json                 print {"url": …} on stdout once it listens
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"sandbox serve: {message}; see perilune sandbox serve --help")


def _parser() -> _Parser:
    parser = _Parser(prog="perilune sandbox serve", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--no-auth", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--memory", type=size)
    parser.add_argument("--overcommit", type=float)
    parser.add_argument("--most", type=int)
    parser.add_argument("--idle", type=float)
    parser.add_argument("--lifetime", type=float)
    parser.add_argument("--snapshots", type=float)
    parser.add_argument("--warm", action="append", default=[])
    parser.add_argument("--allow-image", action="append", default=[])
    parser.add_argument("--allow-tree", action="append", default=[])
    parser.add_argument("--allow-host-network", action="store_true")
    parser.add_argument("--sync", default="batch")
    parser.add_argument("--store", type=size, default=64 << 30)
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: list[str]) -> int:
    """Entry point of the command; returns the exit code."""
    flags = _parser().parse_args(args)
    if flags.help:
        print(HELP, end="")
        return 0
    keys = tuple(flags.api_key)
    if not keys and os.environ.get("PERILUNE_SANDBOX_KEY"):
        keys = (os.environ["PERILUNE_SANDBOX_KEY"],)
    if keys and flags.no_auth:
        raise ConfigError("sandbox serve: --no-auth and an API key exclude each other; leave one out")
    _need_extra()
    from perilune.http.exposure import check_exposure
    from perilune.sandbox import Pool, Sandboxes
    from perilune.sandbox.api import Permissions, serve

    check_exposure(flags.host, keys, flags.no_auth)
    permissions = Permissions(
        images=tuple(flags.allow_image), trees=tuple(flags.allow_tree),
        networks=("none", "host") if flags.allow_host_network else ("none",),
    )  # fmt: skip
    limits, warm = _pool_limits(flags), _warm(flags.warm)
    sandboxes = Sandboxes(flags.folder, sync=flags.sync, max_bytes=flags.store)

    def ready(url: str) -> None:
        if flags.json:
            print(json.dumps({"url": url, "folder": str(sandboxes.home.folder)}), flush=True)
        print(f"sandboxes: page at {url}/, API at {url}/v1; Ctrl-C pauses all and stops", file=sys.stderr, flush=True)

    def terminate(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # The server drains on a signal and then hands it on: both ways of asking it to stop are a normal end.
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with Pool(sandboxes, limits, warm) as pool:
            serve(
                pool,
                flags.port,
                host=flags.host,
                no_auth=flags.no_auth,
                api_keys=keys,
                permissions=permissions,
                on_ready=ready,
            )
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _pool_limits(flags: argparse.Namespace) -> Any:
    from perilune.sandbox import PoolLimits

    given = {
        "memory_bytes": flags.memory, "overcommit": flags.overcommit, "sandboxes": flags.most, "idle_seconds": flags.idle,
        "lifetime_seconds": flags.lifetime, "snapshot_seconds": flags.snapshots,
    }  # fmt: skip
    return PoolLimits(**{name: value for name, value in given.items() if value is not None})


def _warm(wishes: list[str]) -> list[Any]:
    from perilune.sandbox import Spec
    from perilune.sandbox.drivers import DRIVERS
    from perilune.sandbox.pool import Warm

    kinds = []
    for wish in wishes:
        driver, _, number = wish.partition("=")
        if driver not in DRIVERS or not number.isdecimal():
            raise ConfigError(f"--warm {wish!r} must be DRIVER=N with a driver of {', '.join(DRIVERS)}")
        kinds.append(Warm(driver=driver, spec=Spec(), count=int(number)))
    return kinds


def _need_extra() -> None:
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the service needs the package {error.name}: install perilune with the extra 'serve'"
        ) from None
