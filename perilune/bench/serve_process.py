"""A server over random weights in a process of its own, so that its clients do not share its interpreter.

`python -m perilune.bench.serve_process '{"preset": "tiny", …}'` prints its addresses as one JSON line, warms up, and serves
until its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from perilune.errors import CapacityError


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """What is served.

    Attributes:
        preset: of the model, whose weights are random.
        device: cpu | cuda.
        dtype: fp32 | bf16.
        context: most tokens of a prompt and its answer.
        threads: CPU threads; 0 = as torch likes.
        settings: of the engine, see `EngineSettings`.
        max_waiting: requests that may wait or run.
    """

    preset: str = "nano"
    device: str = "cpu"
    dtype: str = "fp32"
    context: int = 8192
    threads: int = 0
    max_waiting: int = 1024
    settings: tuple[tuple[str, Any], ...] = ()


class Servers:
    """One server for each plan, started when it is first needed and ended with the context. One that waits costs nothing, and
    starting one takes longer than many loads."""

    def __init__(self) -> None:
        self._running: dict[ServerPlan, ServerProcess] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._running.values():
            server.stop()  # all at once: each takes a while
        for server in self._running.values():
            server.__exit__()

    def start(self, plans: Iterable[ServerPlan]) -> list[ServerProcess]:
        """Start those that do not run, together, and wait until all have warmed up; returns those that it started.

        Raises:
            CapacityError: one did not start.
        """
        new = [plan for plan in dict.fromkeys(plans) if plan not in self._running]
        with ThreadPoolExecutor(max(1, len(new))) as starters:
            started = [starters.submit(ServerProcess, plan) for plan in new]
        for plan, server in zip(new, started):
            if server.exception() is None:
                self._running[plan] = server.result()
        return [server.result() for server in started]

    def of(self, plan: ServerPlan) -> ServerProcess:
        """The server of a plan that was started."""
        return self._running[plan]


class ServerProcess:
    """A running server that has warmed up; leaving the context ends it.

    Attributes:
        url, admin_url: where it listens.
        started: seconds until it listened; warmed: seconds from then on until it was ready.
    """

    def __init__(self, plan: ServerPlan) -> None:
        command = [sys.executable, "-m", "perilune.bench.serve_process", json.dumps(asdict(plan))]
        began = time.monotonic()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__()
            raise CapacityError("the server did not start; its messages are above")
        addresses = json.loads(line)
        self.url, self.admin_url = addresses["url"], addresses["admin_url"]
        self.started = time.monotonic() - began
        while not self._ready():
            time.sleep(0.05)
        self.warmed = time.monotonic() - began - self.started

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            self.__exit__()
            raise CapacityError("the server ended while it was warming up; its messages are above")
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=10) as response:
                return response.status == 200
        except (urllib.error.URLError, TimeoutError):  # 503 among them
            return False

    def stop(self) -> None:
        """Ask it to end."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main(plan: ServerPlan) -> None:
    """Serve until standard input is closed."""
    import torch

    from perilune.config.presets import preset
    from perilune.model import Transformer, init_weights
    from perilune.model.cast import compute_in
    from perilune.serve.api import Endpoint, Limits, serve
    from perilune.serve.local_engine import LocalEngine
    from perilune.serve.settings import EngineSettings
    from perilune.tokenizer import ByteTokenizer

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("perilune.serve.warm_up").setLevel(logging.INFO)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    with torch.device(plan.device):
        model = init_weights(Transformer(preset(plan.preset)), 0, device=plan.device)
    compute_in(model.eval(), {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.dtype])
    settings = EngineSettings(**dict(plan.settings))
    engine = LocalEngine(model, ByteTokenizer(), name=plan.preset, context_length=plan.context, settings=settings)

    def until_closed() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    def ready(url: str, admin_url: str | None) -> None:
        print(json.dumps({"url": url, "admin_url": admin_url}), flush=True)
        threading.Thread(target=until_closed, daemon=True).start()

    endpoint = Endpoint(port=0, admin_port=0, drain_seconds=0.0)
    with contextlib.suppress(KeyboardInterrupt):  # whoever stops a bench stops its servers, too
        serve(engine, endpoint, limits=Limits(waiting=plan.max_waiting), on_ready=ready)
    engine.close()


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    values["settings"] = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in values["settings"])  # fmt: skip
    main(ServerPlan(**values))
