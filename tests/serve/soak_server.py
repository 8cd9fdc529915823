"""A small server that a soak mistreats, in a process of its own: `python soak_server.py FOLDER` prints its addresses.

The pool has room for little more than one request, the host tier for a few prefixes, the disk tier in FOLDER for some more.
Words on standard input make it fail; its end ends the process, so that nothing outlives a soak that was stopped.

    step      the model's next step raises
    engine    the scheduler raises: a fault of the engine itself
    no-disk   files cannot grow beyond a page of tokens, as on a full disk
    disk      they can again
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from pathlib import Path

import torch
from tiny_model import tiny_engine

from perilune.serve.api import Endpoint, Limits, serve
from perilune.serve.local_engine import LocalEngine
from perilune.serve.settings import EngineSettings

CONTEXT = 160
HOST_BYTES, DISK_BYTES = 2**17, 2**19
GROWTH = 10_000  # bytes: a page of tokens fits, the states of a prefix do not


class Faults:
    """Makes an engine fail when it is told to.

    Args:
        engine: whose runner and scheduler are wrapped.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._pending: set[str] = set()
        runner, scheduler = engine.core.runner, engine.core.scheduler
        runner.run = self._failing("step", runner.run)
        scheduler.plan = self._failing("engine", scheduler.plan)

    def _failing(self, name: str, work):
        def run(*arguments):
            if name in self._pending:
                self._pending.discard(name)
                raise RuntimeError(f"an injected fault of the {name}")
            return work(*arguments)

        return run

    def listen(self) -> None:
        """Until standard input ends."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for line in sys.stdin:
            if line.strip() in ("disk", "no-disk"):
                soft = hard if line.strip() == "disk" else GROWTH
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            else:
                self._pending.add(line.strip())
        os._exit(9)


def main(folder: Path, overlap: bool) -> None:
    """Serve until a signal."""
    settings = EngineSettings(
        unit=4, cache_bytes=0, host_bytes=HOST_BYTES, disk=folder, disk_bytes=DISK_BYTES, overlap=overlap
    )
    engine = tiny_engine(context_length=CONTEXT, settings=settings, dtype=torch.float64)
    faults = Faults(engine)

    def ready(url: str, admin_url: str | None) -> None:
        print(json.dumps({"url": url, "admin_url": admin_url}), flush=True)
        threading.Thread(target=faults.listen, daemon=True).start()

    try:
        serve(engine, Endpoint(port=0, admin_port=0, drain_seconds=3.0), limits=Limits(waiting=12), on_ready=ready)
    finally:
        engine.close(timeout=60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), overlap="overlap" in sys.argv[2:])
