"""The steps of a sandbox's life that are timed, each as an iterator: it takes one sample, yields, and clears up when it is closed.

life                 create, exec (`true`), create_exec (both), destroy
checkpoint_64KiB, _10MiB   save it after that much was written to its files (which are in memory, so that a machine's RAM is dirty)
fork                 fork and fork_exec: a copy that runs; until `true` has run in it. fork_running: of a machine, from the start of its
                     monitor until its processor ran
pause                pause: save it and end it, nothing but the store's bytes is left (which is checked); resume, resume_exec,
                     resume_running as above
warm                 warm_create: one that a pool had ready
session              session_checkpoint: of a Python session whose arena of 32 MiB had 100 pages written (drivers that save files)
clones               overcommit_idle, _loaded: promised over measured memory (PSS and files in memory) of clones of one sandbox
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox import Limits, PythonSession, Sandbox, Sandboxes, Spec
from perilune.sandbox.memory import Memory
from perilune.sandbox.pool import Pool, PoolLimits, Warm

SPEC = Spec(limits=Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, processes=64, exec_seconds=60.0))
REPORT_OVERCOMMIT = 6.5
SIZES = {"64KiB": 1 << 16, "10MiB": 10 << 20}
WARM = 4
FILL = "head -c {size} /dev/urandom > /dev/shm/changed"
SHIFT = "tail -c +2 /dev/shm/changed | dd of=/dev/shm/changed bs=65536 conv=notrunc 2> /dev/null"
"""All of a file is other bytes than before, in the same place. Drawing them anew would take an emulated processor longer than all the rest."""
LOAD_BYTES = 8 << 20
LOAD = (
    f"head -c {LOAD_BYTES} /dev/urandom > /dev/shm/load; echo full; while :; do cksum < /dev/shm/load > /dev/null; done"
)
"""A guest under load: 8 MiB of its own, and a processor kept busy."""


@dataclass
class Samples:
    """Milliseconds of each measured quantity, and other quantities by name."""

    times: dict[str, list[float]] = field(default_factory=dict)
    quantities: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, name: str, seconds: float) -> None:
        """One sample."""
        self.times.setdefault(name, []).append(1e3 * seconds)

    def take(self, name: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Time one call."""
        begun = time.perf_counter()
        value = work(*arguments, **options)
        self.note(name, time.perf_counter() - begun)
        return value


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the steps work with.

    Attributes:
        sandboxes: in a folder of the bench's own.
        driver: its name.
        samples: where the samples go.
        clones: how many for the memory rows.
        seconds: how long the step may still take, as asked at that moment; for what would wait without an end.
    """

    sandboxes: Sandboxes
    driver: str
    samples: Samples
    clones: int
    seconds: Callable[[], float]

    def create(self) -> Sandbox:
        """A new sandbox."""
        return self.sandboxes.create(SPEC, driver=self.driver)

    def forget(self) -> None:
        """Delete all snapshots, so that a long bench does not fill a tmpfs."""
        self.sandboxes.home.store.delete(self.sandboxes.home.store.snapshots())


Step = Callable[[Bench], Iterator[None]]


def ran(box: Sandbox, script: str = "") -> None:
    """Run `true` or a script. Raises ConfigError if it does not end with 0."""
    result = box.exec(["sh", "-c", script] if script else ["true"])
    if result.code != 0:
        raise ConfigError(f"a command of the bench ended with {result.code}: {result.stderr[:200]!r}")


def life(bench: Bench) -> Iterator[None]:
    """See above."""
    bench.create().destroy()  # Builds templates, starts the fork server.
    while True:
        begun = time.perf_counter()
        box = bench.samples.take("create", bench.create)
        ran(box)
        bench.samples.note("create_exec", time.perf_counter() - begun)
        bench.samples.take("exec", ran, box)
        bench.samples.take("destroy", box.destroy)
        yield


def checkpoint(name: str) -> Step:
    """The step for one of `SIZES`."""

    def step(bench: Bench) -> Iterator[None]:
        box = bench.create()
        try:
            changes = _changes(box, SIZES[name])
            next(changes)
            box.checkpoint()  # The first one stores what the guest has written before; it is in no sample.
            for _ in changes:
                bench.samples.take(f"checkpoint_{name}", box.checkpoint)
                yield
        finally:
            box.destroy()
            bench.forget()

    return step


def _changes(box: Sandbox, size: int) -> Iterator[None]:
    """Each time, that much of its files is new."""
    ran(box, FILL.format(size=size))
    while True:
        yield
        ran(box, SHIFT)


def fork(bench: Bench) -> Iterator[None]:
    """See above."""
    box = bench.create()
    try:
        ran(box)
        box.checkpoint()
        while True:
            for name in ("fork", "fork_exec"):
                child = bench.samples.take(name, _forked, box, name == "fork_exec")
                _note_running(bench, child, "fork_running")
                child.destroy()
            yield
    finally:
        box.destroy()
        bench.forget()


def _forked(box: Sandbox, run: bool) -> Sandbox:
    child = box.fork(1)[0]
    if run:
        ran(child)
    return child


def _note_running(bench: Bench, box: Sandbox, name: str) -> None:
    """What a machine tells of its own start."""
    seconds = getattr(box._machine, "seconds", {})
    if "running" in seconds:
        bench.samples.note(name, seconds["running"])


def pause(bench: Bench) -> Iterator[None]:
    """See above."""
    box = bench.create()
    held, store = bench.samples.quantities.setdefault("pause", {}), bench.sandboxes.home.store
    try:
        changes = _changes(box, SIZES["64KiB"])
        while True:
            for name in ("resume", "resume_exec"):
                next(changes)
                bench.samples.take("pause", box.pause)
                held["held_bytes"] = max(held.get("held_bytes", 0.0), float(box.memory().total))
                if box.memory() != Memory():
                    raise ConfigError("a sandbox that was paused to the store holds memory")
                bench.samples.take(name, _resumed, box, name == "resume_exec")
                _note_running(bench, box, "resume_running")
            held["store_bytes"] = float(store.used_bytes())
            yield
    finally:
        box.destroy()
        bench.forget()


def _resumed(box: Sandbox, run: bool) -> None:
    box.resume()
    if run:
        ran(box)


def warm(bench: Bench) -> Iterator[None]:
    """See above. A pool closes the sandboxes it was given, so that it has its own over the same folder."""
    home = bench.sandboxes.home
    sandboxes = Sandboxes(home.folder, sync=home.store.sync)
    limits = PoolLimits(tick_seconds=3600.0, wait_seconds=0.0)
    with Pool(sandboxes, limits, [Warm(driver=bench.driver, spec=SPEC, count=WARM)]) as pool:
        while True:
            pool.reaper.tick()
            for _ in range(WARM):
                box = bench.samples.take("warm_create", pool.create, SPEC, driver=bench.driver)
                pool.destroy(box.id)
                yield


def session(bench: Bench) -> Iterator[None]:
    """See above. Does nothing where the guest has no Python, or the driver saves memory anyway."""
    if bench.sandboxes.driver(bench.driver).contains != "files":
        return
    box = bench.create()
    try:
        with contextlib.suppress(SandboxError), PythonSession(box, arena_bytes=48 << 20) as python:
            python.run("import os\nb = arena.block('b', 32 << 20)\nb[:] = os.urandom(len(b))")
            box.checkpoint()
            bench.samples.quantities["session_checkpoint"] = {
                "arena_bytes": float(32 << 20), "pages": 100.0, "tracked": float(not python.tracked),
            }  # fmt: skip
            while True:
                python.run("for page in range(100): b[page * 327680 + 7] ^= 1")
                bench.samples.take("session_checkpoint", box.checkpoint)
                yield
    finally:
        box.destroy()
        bench.forget()


def clones(bench: Bench) -> Iterator[None]:
    """See above; one sample of each, the loaded one only where all clones have filled their memory in time."""
    if not bench.clones:
        return
    parent = bench.create()
    made: list[Sandbox] = []
    promised = float(bench.clones * SPEC.limits.memory_bytes)
    try:
        ran(parent)
        made += parent.fork(bench.clones)
        for clone in made:
            ran(clone)
        bench.samples.quantities["overcommit_idle"] = _share(made, promised)
        yield
        with contextlib.ExitStack() as loads:
            running = []
            for clone in made:
                running.append(clone.start(["sh", "-c", LOAD], timeout=max(1.0, bench.seconds())))
                loads.callback(running[-1].close)
            # Each says so once; a command whose time is over before that ends without.
            full = [any(b"full" in output.data for output in load) for load in running]
            if all(full):
                bench.samples.quantities["overcommit_loaded"] = _share(made, promised)
    finally:
        for clone in made:
            clone.destroy()
        parent.destroy()
        bench.forget()


def _share(made: list[Sandbox], promised: float) -> dict[str, float]:
    held = sum((clone.memory() for clone in made), Memory())
    return {
        "clones": float(len(made)), "promised_bytes": promised, "pss_bytes": float(held.pss), "files_bytes": float(held.files),
        "rss_bytes": float(held.rss), "overcommit": promised / max(1, held.total), "report_overcommit": REPORT_OVERCOMMIT,
    }  # fmt: skip


STEPS: dict[str, Step] = {
    "life": life, **{f"checkpoint_{name}": checkpoint(name) for name in SIZES}, "fork": fork, "pause": pause, "warm": warm,
    "session": session, "clones": clones,
}  # fmt: skip
SHARES = dict.fromkeys(STEPS, 1) | {"clones": 4}
"""Of the time, each one's part."""
