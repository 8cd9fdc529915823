"""Times and memory of sandboxes: every driver whose probe passes, with its snapshots on tmpfs and on a disk that is synced.

    create, exec, create_exec    a new sandbox; `true` in one that runs; both, one after the other
    warm_create                  one that a pool had ready
    checkpoint_64KiB, _10MiB     save it after that much was written to its files (which are in memory, so that a machine's RAM is dirty)
    fork, fork_exec              a copy that runs; until `true` has run in it
    pause                        save and end it: nothing but the store's bytes is left (`held_bytes` is measured)
    resume, resume_exec          back from the store; until `true` has run in it
    destroy
    session_checkpoint           of a Python session whose arena of 32 MiB had 100 pages written (drivers that save files)
    overcommit_idle, _loaded     clones of one sandbox: promised over measured memory (PSS and files in memory), not milliseconds

Medians, with the 95th percentile in `extra.p95_ms`. The report's figures stand beside: 133 ms and 49 ms are "as low as", of Firecracker
with real guests and durable storage; up to 6.5 times is of real workloads. Ours are small guests of one machine.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox import Limits, PythonSession, Sandbox, Sandboxes, Spec
from perilune.sandbox.drivers import DRIVERS
from perilune.sandbox.memory import Memory
from perilune.sandbox.pool import Pool, PoolLimits, Warm

if TYPE_CHECKING:
    from perilune.bench.harness import Row

SPEC = Spec(limits=Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, processes=64))
REPORT = {
    "checkpoint_10MiB": ("K3 report: checkpoint as low as", 133.0),
    "resume": ("K3 report: resume as low as", 49.0),
}
REPORT_CONDITIONS = "Firecracker microVMs with real guests on durable storage; best cases"
REPORT_OVERCOMMIT = 6.5
TMPFS = Path("/dev/shm")
WRITE = "head -c {size} /dev/urandom > /dev/shm/changed"
LOAD = "head -c 8388608 /dev/urandom > /dev/shm/load; while :; do cksum < /dev/shm/load > /dev/null; done"
"""A guest under load: 8 MiB of its own, and a processor kept busy."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where snapshots go: a folder and how they are synced."""

    name: str
    folder: Path
    sync: str


def places(disk: Path | None) -> list[Place]:
    """tmpfs without syncing, if there is one, and a disk folder with."""
    found = [Place(name="tmpfs", folder=TMPFS, sync="none")] if TMPFS.is_dir() else []
    folder = disk or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"--disk {folder} is not a folder")
    return [*found, Place(name="disk", folder=folder, sync="batch")]


@dataclass
class Samples:
    """Milliseconds of each step of one driver at one place, and other quantities by name."""

    times: dict[str, list[float]] = field(default_factory=dict)
    quantities: dict[str, dict[str, float]] = field(default_factory=dict)

    def take(self, name: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Time one call."""
        begun = time.perf_counter()
        value = work(*arguments, **options)
        self.times.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        return value


def _ran(box: Sandbox, script: str = "") -> None:
    result = box.exec(["sh", "-c", script] if script else ["true"])
    if result.code != 0:
        raise ConfigError(f"a command of the bench ended with {result.code}: {result.stderr[:200]!r}")


def _lives(sandboxes: Sandboxes, driver: str, runs: int, samples: Samples) -> None:
    """Every step of a sandbox's life, `runs` times."""
    sandboxes.create(SPEC, driver=driver).destroy()  # Builds templates, starts the fork server.
    for _ in range(runs):
        begun = time.perf_counter()
        box = samples.take("create", sandboxes.create, SPEC, driver=driver)
        _ran(box)
        samples.times.setdefault("create_exec", []).append(1e3 * (time.perf_counter() - begun))
        samples.take("exec", _ran, box)
        for name, size in (("64KiB", 1 << 16), ("10MiB", 10 << 20)):
            _ran(box, WRITE.format(size=size))
            samples.take(f"checkpoint_{name}", box.checkpoint)
        for name in ("fork", "fork_exec"):
            child = samples.take(name, _forked, box, name == "fork_exec")
            child.destroy()
        for name in ("resume", "resume_exec"):
            _ran(box, WRITE.format(size=1 << 16))
            samples.take("pause", box.pause)
            if box.memory() != Memory():
                raise ConfigError("a sandbox that was paused to the store holds memory")
            samples.take(name, _resumed, box, name == "resume_exec")
        samples.take("destroy", box.destroy)
    samples.quantities["pause"] = {"held_bytes": 0.0, "store_bytes": float(sandboxes.home.store.used_bytes())}


def _forked(box: Sandbox, run: bool) -> Sandbox:
    child = box.fork(1)[0]
    if run:
        _ran(child)
    return child


def _resumed(box: Sandbox, run: bool) -> None:
    box.resume()
    if run:
        _ran(box)


def _warm(sandboxes: Sandboxes, driver: str, runs: int, samples: Samples) -> None:
    limits = PoolLimits(tick_seconds=3600.0, wait_seconds=0.0)
    with Pool(sandboxes, limits, [Warm(driver=driver, spec=SPEC, count=4)]) as pool:
        for number in range(runs):
            if number % 4 == 0:
                pool.reaper.tick()
            box = samples.take("warm_create", pool.create, SPEC, driver=driver)
            pool.destroy(box.id)


def _session(sandboxes: Sandboxes, driver: str, runs: int, samples: Samples) -> None:
    """Checkpoints of a session's arena. Raises SandboxError where the guest has no Python."""
    box = sandboxes.create(SPEC, driver=driver)
    with PythonSession(box, arena_bytes=48 << 20) as session:
        session.run("import os\nb = arena.block('b', 32 << 20)\nb[:] = os.urandom(len(b))")
        box.checkpoint()
        for number in range(runs):
            session.run(f"for page in range(100): b[page * 327680 + {number}] ^= 1")
            samples.take("session_checkpoint", box.checkpoint)
        samples.quantities["session_checkpoint"] = {
            "arena_bytes": float(32 << 20),
            "pages": 100.0,
            "tracked": float(not session.tracked),
        }
    box.destroy()


def _clones(sandboxes: Sandboxes, driver: str, count: int, samples: Samples) -> None:
    """Memory of `count` clones of one sandbox, idle and under load."""
    parent = sandboxes.create(SPEC, driver=driver)
    _ran(parent)
    clones = parent.fork(count)
    promised = float(count * SPEC.limits.memory_bytes)
    try:
        for clone in clones:
            _ran(clone)
        samples.quantities["overcommit_idle"] = _share(clones, promised)
        loads = [clone.start(["sh", "-c", LOAD]) for clone in clones]
        wait = "until test $(wc -c < /dev/shm/load) = 8388608; do sleep 0.2; done"
        for clone in clones:
            _ran(clone, wait)
        samples.quantities["overcommit_loaded"] = _share(clones, promised)
        for load in loads:
            load.close()
    finally:
        for clone in clones:
            clone.destroy()
        parent.destroy()


def _share(clones: list[Sandbox], promised: float) -> dict[str, float]:
    held = sum((clone.memory() for clone in clones), Memory())
    return {
        "clones": float(len(clones)), "promised_bytes": promised, "pss_bytes": float(held.pss), "files_bytes": float(held.files),
        "rss_bytes": float(held.rss), "overcommit": promised / max(1, held.total), "report_overcommit": REPORT_OVERCOMMIT,
    }  # fmt: skip


@contextlib.contextmanager
def _home(place: Place) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="perilune-bench-", dir=place.folder, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def measured(driver: str, place: Place, runs: int, clones: int) -> Samples:
    """All steps of one driver with its snapshots at one place."""
    samples = Samples()
    with _home(place) as folder:
        with Sandboxes(folder, sync=place.sync) as sandboxes:
            _lives(sandboxes, driver, runs, samples)
            if sandboxes.driver(driver).contains == "files":
                with contextlib.suppress(SandboxError):
                    _session(sandboxes, driver, runs, samples)
            if clones:
                _clones(sandboxes, driver, clones, samples)
        _warm(Sandboxes(folder, sync=place.sync), driver, runs, samples)
    return samples


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def rows(driver: str, place: Place, samples: Samples) -> list[Row]:
    """Benchmark rows of these samples."""
    from perilune.bench.harness import Row, commit, device_name, versions

    found = []
    for name in sorted(samples.times.keys() | samples.quantities.keys()):
        times = samples.times.get(name, [math.nan])
        median, (peer, peer_ms) = statistics.median(times), REPORT.get(name, ("", None))
        extra = dict(samples.quantities.get(name, {}))
        if name in samples.times:
            extra["p95_ms"] = percentile(times, 0.95)
        found.append(
            Row(
                name=f"sandbox_{driver}_{name}_{place.name}", shape=f"{driver}, {SPEC.limits.memory_bytes >> 20} MiB, {place.name}, sync {place.sync}",
                ours_ms=median if name in samples.times else 0.0, peer=f"{peer} ({REPORT_CONDITIONS})" if peer else "", peer_ms=peer_ms,
                ratio=peer_ms / median if peer_ms else None, bound_ms=None, device=device_name("cpu"), versions=versions(),
                commit=commit(), ours_spread_ms=(min(times), max(times)) if name in samples.times else (0.0, 0.0),
                peer_spread_ms=None, samples=len(times) if name in samples.times else 1, extra=extra,
            )
        )  # fmt: skip
    return found


def run(
    drivers: tuple[str, ...], runs: int, clones: int, disk: Path | None, *, results: Path | None = None,
    budget_seconds: float | None = None, on_row: Callable[[Row], None] | None = None, on_note: Callable[[str], None] | None = None,
) -> list[Row]:  # fmt: skip
    """Measure drivers; one whose probe does not pass is told of and left out.

    Args:
        drivers: names; empty = all.
        runs: lives of a sandbox for each driver and place.
        clones: for the memory rows; 0 = none.
        disk: folder on a disk; None = the system's folder for temporary files.
        results: a .jsonl file to append to.
        budget_seconds: after which no further driver or place is begun.

    Raises:
        ConfigError: an unknown driver, or a number that cannot be one.
    """
    from perilune.bench.harness import append

    for name in drivers:
        if name not in DRIVERS:
            raise ConfigError(f"driver {name!r} is not one of {', '.join(DRIVERS)}")
    if runs < 1 or not 0 <= clones <= 64:
        raise ConfigError(f"runs={runs} must be 1 or more and clones={clones} 0 to 64")
    begun, found = time.monotonic(), []
    for driver in drivers or tuple(DRIVERS):
        with (
            tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder,
            Sandboxes(Path(folder), sync="none") as sandboxes,
        ):
            probe = sandboxes.probe(driver)
        if not probe.passed:
            if on_note is not None:
                on_note(f"{driver} is left out: {probe.reason}")
            continue
        for place in places(disk):
            if budget_seconds is not None and time.monotonic() - begun >= budget_seconds:
                break
            for row in rows(driver, place, measured(driver, place, runs, clones if place.sync == "none" else 0)):
                found.append(row)
                if results is not None:
                    append(results, row)
                if on_row is not None:
                    on_row(row)
    return found
