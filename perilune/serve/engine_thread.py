"""A thread that owns what it works on: everybody else leaves commands, which it runs between two pieces of its work."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from perilune.ops.native.build import release_threads
from perilune.serve.engine import EngineClosed

Result = TypeVar("Result")
IDLE_SECONDS = 0.002  # until work is looked for anew when there was none
EXIT_SECONDS = 30.0  # that the end of the process waits for a step under way, and whatever the step compiles


class _Thread(threading.Thread):
    """Ends when its process does, and before it: `_end_threads`."""

    def __init__(self, owner: EngineThread, run: Callable[[], None]) -> None:
        super().__init__(target=run, name="perilune-engine", daemon=True)
        self.owner = weakref.ref(owner)


@atexit.register
def _end_threads() -> None:
    # Python ends a daemon thread by unwinding its stack as soon as it wants to run Python again. C++ answers that with
    # std::terminate: were the thread within a tensor operation then, or freeing the model, the process would abort.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread) and thread.is_alive()]
    for thread in threads:
        if (owner := thread.owner()) is not None:
            owner.close(0.0)
    for thread in threads:
        thread.join(EXIT_SECONDS)


class EngineThread(ABC):
    """The thread, begun by the first command, and its inbox."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a garbage collection within it may stop a job
        self._thread: threading.Thread | None = None
        self._process = 0  # where the thread runs
        self._closed = self._paused = False

    # ---- what it works on

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether there is nothing to do until the next command."""

    @abstractmethod
    def begun(self) -> None:
        """The thread begins."""

    @abstractmethod
    def step(self) -> bool:
        """Do a piece of the work; False if nothing could be done now."""

    @abstractmethod
    def settle(self) -> None:
        """Bring what is under way to its end."""

    def fatal(self, error: BaseException) -> bool:
        """Whether nothing more can be computed after this error; the thread then ends by it."""
        return False

    @abstractmethod
    def end(self, error: BaseException) -> None:
        """Tell all who wait that nothing comes any more; may be called again."""

    @abstractmethod
    def ended(self) -> None:
        """The thread ends, and not by a fault."""

    # ---- from any thread

    def post(self, command: Callable[[], None]) -> None:
        """Run a command between two pieces of work. EngineClosed: nothing is taken in any more."""
        if self._forked:
            raise EngineClosed(
                f"the engine runs in process {self._process}, of which this one is a fork without the engine's thread; "
                "load the model here, in a process that was spawned"
            )
        with self._lock:
            if self._closed:
                raise EngineClosed(
                    "the engine is closed and takes no more requests; ask another server, or load the model again"
                )
            if self._thread is None:
                release_threads()  # of the thread that loaded the model: from here on another one computes
                self._thread, self._process = _Thread(self, self._run), os.getpid()
            if self._thread.ident is None:  # now, or if a signal has kept the last command from it
                self._thread.start()
            self.inbox.put(command)

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread while nothing is under way; returns, or raises, what it does."""
        if threading.current_thread() is self._thread:
            return function()
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                self.settle()
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))
                if self.fatal(error):
                    raise

        self.post(run)
        result, error = answer.get()
        if error is not None:
            raise error
        return result

    def pause(self) -> None:
        """Finish what is under way and begin no more; commands are still taken in."""
        self.call(lambda: setattr(self, "_paused", True))

    def resume(self) -> None:
        """Go on after `pause`."""
        self.call(lambda: setattr(self, "_paused", False))

    @property
    def paused(self) -> bool:
        """Whether `pause` holds."""
        return self._paused

    @property
    def closed(self) -> bool:
        """Whether it takes no more commands."""
        return self._closed or self._forked

    @property
    def _forked(self) -> bool:
        """Whether this process is a fork of the one in which the thread runs: threads are not copied."""
        return self._thread is not None and self._process != os.getpid()

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop: whoever waits is told, the thread ends."""
        if self._forked:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            thread = self._thread
        if thread is None or not thread.is_alive():
            if first:
                self.ended()
        else:
            self.inbox.put(lambda: None)
            if thread is not threading.current_thread():
                thread.join(timeout)

    # ---- on the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.begun()
            while not self._closed:
                self._take_commands(wait=None if self._paused or self.idle else 0.0)
                if not self._closed and not self._paused and not self.idle and not self.step():
                    self._take_commands(wait=IDLE_SECONDS)
        except BaseException as caught:  # a fault of the engine itself: nothing it holds can be trusted
            error = caught
            with self._lock:
                self._closed = True
        why = f"stopped by a fault: {error}" if error else "closed"
        ended = EngineClosed(f"the engine was {why}; ask another server, or start this one again")
        self.end(ended)
        while not self.inbox.empty():  # whoever waits for a `call` gets its answer
            with contextlib.suppress(Exception):
                self.inbox.get()()
        self.end(ended)
        if error is not None:
            raise error
        self.ended()

    def _take_commands(self, wait: float | None) -> None:
        """Run all commands that are there; with none, wait for one for so many seconds (None = as long as it takes)."""
        try:
            command = self.inbox.get_nowait() if wait == 0.0 else self.inbox.get(timeout=wait)
            while True:
                command()
                command = self.inbox.get_nowait()
        except queue.Empty:
            return
