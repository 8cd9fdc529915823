"""The sandbox that a command of `perilune sandbox` runs in: new, kept, or from a snapshot; here, or at a service."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perilune.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from perilune.sandbox import RemoteSandbox, RemoteSandboxes, Spec

DRIVER = "proc"
"""Where none is asked for."""
SLOW_SECONDS = 2.0


def spec_of(flags: argparse.Namespace) -> Spec:
    """What a new sandbox is made from."""
    from perilune.sandbox import Limits, Spec

    given = {
        "memory_bytes": flags.memory, "disk_bytes": flags.disk, "processes": flags.processes, "cpus": flags.cpus,
        "exec_seconds": flags.timeout,
    }  # fmt: skip
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    return Spec(
        template="host" if flags.image is None else flags.image,
        trees=tuple(flags.tree),
        limits=limits,
        network="none" if flags.network is None else flags.network,
        changes="memory" if flags.changes is None else flags.changes,
    )


def variables(flags: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of a command, and its secrets. Raises ConfigError for one that is none."""
    env, secrets = {}, {}
    for pair in flags.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env {pair!r} must be NAME=VALUE")
        env[name] = value
    for name in flags.secret:
        if name not in os.environ:
            raise ConfigError(f"--secret {name}: this environment has no variable {name}")
        secrets[name] = os.environ[name]
    return env, secrets


def created(sandboxes: Any, flags: argparse.Namespace) -> Any:
    """A new sandbox as the flags want it."""
    driver = DRIVER if flags.driver is None else flags.driver
    with said_if_slow(f"making a sandbox of driver {driver}; a machine boots once for each image and size of memory, and "
                      "is copied from then on"):  # fmt: skip
        return sandboxes.create(spec_of(flags), driver=driver, name=flags.name)


@contextlib.contextmanager
def said_if_slow(text: str) -> Iterator[None]:
    """Tell somebody who waits at a terminal for what, if it takes longer than a moment; a script's stderr stays the program's."""
    timer = threading.Timer(SLOW_SECONDS, lambda: print(f"perilune: {text} …", file=sys.stderr, flush=True))
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def opened(sandboxes: Any, flags: argparse.Namespace, source: str | None) -> Iterator[Any]:
    """A running sandbox: new, kept, or from a snapshot; kept again afterwards where that is wanted."""
    keep = flags.keep or flags.name is not None
    if source is not None:
        given = [
            name
            for name in ("driver", "image", "network", "changes", "memory", "disk", "processes", "cpus")
            if getattr(flags, name) is not None
        ]
        if given or flags.tree:
            raise ConfigError(f"--{(given or ['tree'])[0]} is decided when a sandbox is made; {source} has its own")
    if flags.url:
        with opened_there(sandboxes, flags, source, keep) as box:
            yield box
        return
    if source is None:
        box = created(sandboxes, flags)
    elif source.startswith("snap-"):
        box = sandboxes.resume(source, name=flags.name)
    else:
        if flags.name is not None:
            raise ConfigError(f"--name {flags.name}: {source} has a name; fork it to have another one")
        box, keep = sandboxes.open(source), True
        try:
            box.resume()
        except BaseException:
            box.release()
            raise
    before = box.snapshot if source is None or not source.startswith("snap-") else None
    try:
        yield box
    finally:
        if keep and box.state.value == "running":
            try:
                box.release()
            except SandboxError:
                if before is not None:  # What was kept before stays as it was.
                    box.revert()
                    box.release()
                raise
            if before is not None:
                sandboxes.home.store.delete([before])
            if not flags.json:
                print(f"kept: {box.name}", file=sys.stderr)


@contextlib.contextmanager
def opened_there(
    sandboxes: RemoteSandboxes, flags: argparse.Namespace, source: str | None, keep: bool
) -> Iterator[RemoteSandbox]:
    """The same at a service, where a kept sandbox runs on."""
    if source is None:
        box = created(sandboxes, flags)
    elif source.startswith("snap-"):
        box = sandboxes.resume(source, name=flags.name)
    else:
        box, keep = sandboxes.open(source), True
        if box.state.value == "paused":
            box.resume()
    try:
        yield box
    finally:
        if not keep:
            box.destroy()
        elif not flags.json:
            print(f"kept: {box.name}", file=sys.stderr)
