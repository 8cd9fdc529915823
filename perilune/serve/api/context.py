"""What all endpoints share: engine, limits, who may ask, and how a request is taken in."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from perilune.http.access import Access
from perilune.http.errors import APIError
from perilune.serve.api.envelope import unavailable
from perilune.serve.api.exchange import Exchange, Exchanges
from perilune.serve.api.limits import Limits
from perilune.serve.api.logs import record, request_id
from perilune.serve.api.metrics import Metrics
from perilune.serve.api.protocol import decode
from perilune.serve.api.words import Words
from perilune.serve.engine import Engine, EngineClosed, Job, Loop

T = TypeVar("T")
SHORT_WARM_UP = 0.5  # seconds that nobody need hear of: the server answers no sooner

log = logging.getLogger(__name__)


class Context:
    """One server's parts.

    Args:
        engine: answers.
        limits: of requests.
        access: who may ask.

    Attributes:
        created: when the server began, in Unix seconds.
        loop: runs jobs; set while the application runs.
        warming: whether the engine's warm-up is under way.
        on_warm: called at its end, before the server is ready.
    """

    def __init__(self, engine: Engine, limits: Limits, access: Access) -> None:
        self.engine = engine
        self.limits = limits
        self.access = access
        self.words = Words(engine.tokenizer)
        self.metrics = Metrics(engine.name, engine)
        self.exchanges = Exchanges(self.metrics)
        self.created = int(time.time())
        self.loop: Loop | None = None
        self.warming = False
        self.on_warm: Callable[[], None] = lambda: None
        # Rendering a prompt and building a grammar take time, and neither may keep other answers waiting.
        self._prepare = ThreadPoolExecutor(1, thread_name_prefix="perilune-prepare")

    async def start(self) -> None:
        """The application begins, and warms its engine up; if that takes long, beside what it does already."""
        self.loop = self.engine.loop(self.limits.waiting)
        self.warming = True
        # A thread of its own: one of the event loop's would have to end before the process may.
        threading.Thread(target=self._warm_up, name="perilune-warm-up", daemon=True).start()
        until = time.monotonic() + SHORT_WARM_UP
        while self.warming and time.monotonic() < until:
            await asyncio.sleep(0.001)

    def _warm_up(self) -> None:
        try:
            self.engine.warm_up()
            self.on_warm()
        except EngineClosed:
            pass
        except Exception:
            log.exception("the warm-up failed; the first requests may have to wait")
        finally:
            self.warming = False

    async def stop(self) -> None:
        """The application ends; running answers are cut."""
        self._prepare.shutdown(wait=False, cancel_futures=True)
        if self.loop is not None:
            await asyncio.to_thread(self.loop.shutdown)

    def check_alive(self) -> None:
        """EngineClosed if the engine has ended; the server follows it."""
        if self.engine.closed:
            raise EngineClosed("the engine has stopped, and this server with it; ask another one, or again")

    def check_open(self) -> None:
        """APIError 503 if the server takes no further requests."""
        self.check_alive()
        if self.exchanges.draining:
            raise unavailable("the server is stopping; ask another one", "draining")

    def check_ready(self) -> None:
        """APIError 503 if a request would not be answered now: the server stops, or the engine warms up or is paused."""
        self.check_open()
        if self.warming:
            raise unavailable("the engine is warming up", "warming_up")
        if not self.engine.ready:
            raise unavailable("the engine is paused", "engine_not_ready")

    def check_model(self, name: str | None) -> None:
        """APIError 404 if another model is asked for."""
        if name is not None and name != self.engine.name:
            raise APIError(
                404, f"the model {name[:200]!r} is not served here; this server has {self.engine.name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def read(self, request: Request, kind: type[T]) -> T:
        """Check who asks, and read the body as `kind`."""
        self.access.check(request)
        self.check_open()
        return decode(await self.body(request), kind)

    async def body(self, request: Request) -> bytes:
        """The request body; refused when it is announced as, or grows, larger than the limit, or does not come on."""
        chunks, size, limits = [], 0, self.limits
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limits.body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(limits.client_seconds) as patience:
                async for chunk in request.stream():
                    patience.reschedule(asyncio.get_running_loop().time() + limits.client_seconds)
                    size += len(chunk)
                    if size > limits.body_bytes:
                        raise self._too_large()
                    chunks.append(chunk)
        except TimeoutError:
            raise APIError(
                408, f"nothing more of the body has come for {limits.client_seconds:g} s", code="timeout",
                headers={"Connection": "close"},
            ) from None  # fmt: skip
        return b"".join(chunks)

    def _too_large(self) -> APIError:
        message = f"the body is larger than the allowed {self.limits.body_bytes} bytes"
        return APIError(413, message, code="body_too_large", headers={"Connection": "close"})

    async def prepare(self, work: Callable[[], T]) -> T:
        """Do something that takes time beside the event loop, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._prepare, work)

    async def exchange(self, request: Request, make: Callable[[], Job], rows: int, **note: Any) -> Exchange:
        """Make a job, hand it to the engine, and list it.

        Args:
            request: asks for it.
            make: renders the prompt and checks the request.
            rows: how many answers the job has.
            note: what else is logged about it.
        """
        entry = record(request.scope)
        entry |= note
        job = await self.prepare(make)
        self.check_open()
        assert self.loop is not None, "the application has not been started"
        stream = self.loop.submit(job)
        return Exchange(self.exchanges, request_id(request.scope), stream, rows, self.limits.request_seconds, entry)
