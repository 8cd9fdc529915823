"""Times and memory of sandboxes: every driver whose probe passes, with its snapshots on tmpfs and on a disk that is synced.

What is measured stands in `sandbox_steps.py`. Medians over up to `runs` samples, with the 95th percentile in `extra.p95_ms` and the
machine's load of that minute in `extra.load`. A budget is shared out evenly over what is left to measure: a step that has used its
share ends with the samples that it has (`samples` says how many), and one that would begin after the end is left out and named.

The report's figures stand beside: 133 ms and 49 ms are "as low as", of Firecracker with real guests and durable storage; up to 6.5
times is of real workloads. Ours are small guests of one machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.bench.sandbox_steps import REPORT_OVERCOMMIT, SHARES, SPEC, STEPS, Bench, Samples
from perilune.errors import ConfigError
from perilune.sandbox import Sandboxes
from perilune.sandbox.drivers import DRIVERS

if TYPE_CHECKING:
    from perilune.bench.harness import Row

REPORT = {
    "checkpoint_10MiB": ("K3 report: checkpoint as low as", 133.0),
    "resume": ("K3 report: resume as low as", 49.0),
}
REPORT_CONDITIONS = "Firecracker microVMs with real guests on durable storage; best cases"
OUR_CONDITIONS = f"small guests of this machine ({SPEC.limits.memory_bytes >> 20} MiB), one at a time; clones of one sandbox for the memory rows"
TMPFS = Path("/dev/shm")
LEAST = 3
"""Samples that a step takes even where its share of the time is over."""
NOTE_SECONDS = 5.0
"""How long nothing may be said while a step goes on."""


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
class Clock:
    """A budget of seconds, and whom to tell how it is used.

    Attributes:
        seconds: of all that is measured; inf = no limit.
        tell: takes a line.
        now: the present, in seconds.
    """

    seconds: float
    tell: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _begun: float = field(init=False)
    _told: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self._told = self.now()

    def used(self) -> float:
        """Seconds since it was made."""
        return self.now() - self._begun

    def left(self) -> float:
        """Seconds that are left, not below zero."""
        return max(0.0, self.seconds - self.used())

    def note(self, text: str, *, urgent: bool = False) -> None:
        """Tell where it stands, unless something was told just before."""
        if urgent or self.now() - self._told >= NOTE_SECONDS:
            self._told = self.now()
            of = f" of {self.seconds:.0f}" if math.isfinite(self.seconds) else ""
            self.tell(f"[{self.used():.0f}{of} s] {text}")


@contextlib.contextmanager
def _home(place: Place) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="perilune-bench-", dir=place.folder, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def measured(driver: str, place: Place, runs: int, clones: int, clock: Clock, rest: float = 0.0) -> Iterator[Samples]:
    """Each step of one driver with its snapshots at one place, as it is done.

    Args:
        rest: share of the time that is left to be kept for what comes after this place.
    """
    end = clock.used() + (1 - rest) * clock.left()
    steps = {name: step for name, step in STEPS.items() if clones or name != "clones"}
    with _home(place) as folder, Sandboxes(folder, sync=place.sync) as sandboxes:
        for number, (name, step) in enumerate(steps.items()):
            if clock.used() >= end:
                clock.note(
                    f"{driver}, {place.name}: the time is over; left out: {', '.join(list(steps)[number:])}",
                    urgent=True,
                )
                return
            share = SHARES[name] / sum(SHARES[later] for later in list(steps)[number:])
            until = clock.used() + share * (end - clock.used())
            samples, taken = Samples(), 0
            clock.note(f"{driver}, {place.name}: {name}", urgent=True)
            seconds = lambda until=until: min(600.0, until - clock.used())  # noqa: E731
            bench = Bench(sandboxes=sandboxes, driver=driver, samples=samples, clones=clones, seconds=seconds)
            with contextlib.closing(step(bench)) as iterator:  # type: ignore[type-var]
                for taken, _ in enumerate(iterator, 1):
                    if taken >= runs or (taken >= LEAST and clock.used() >= until):
                        break
                    clock.note(f"{driver}, {place.name}: {name}, {taken} of {runs}")
            yield samples


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
        extra = {**samples.quantities.get(name, {}), "load": os.getloadavg()[0]}
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


def conditions() -> dict[str, str]:
    """What stands beside a comparison: ours and the report's."""
    return {
        "ours": f"{OUR_CONDITIONS}; {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}",
        "report": f"{REPORT_CONDITIONS}; overcommit up to {REPORT_OVERCOMMIT} in real workloads",
    }


def run(
    drivers: tuple[str, ...], runs: int, clones: int, disk: Path | None, *, results: Path | None = None,
    budget_seconds: float | None = None, on_note: Callable[[str], None] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Measure drivers, giving each row when it is known; a driver whose probe does not pass is told of and left out.

    Args:
        drivers: names; empty = all.
        runs: samples of each row.
        clones: for the memory rows; 0 = none.
        disk: folder on a disk; None = the system's folder for temporary files.
        results: a .jsonl file to append to.
        budget_seconds: after which nothing further is begun; None = no limit.
        on_note: is told what is being done.

    Raises:
        ConfigError: an unknown driver, or a number that cannot be one.
    """
    for name in drivers:
        if name not in DRIVERS:
            raise ConfigError(f"driver {name!r} is not one of {', '.join(DRIVERS)}")
    if runs < 1 or not 0 <= clones <= 64:
        raise ConfigError(f"runs={runs} must be 1 or more and clones={clones} 0 to 64")
    clock = Clock(math.inf if budget_seconds is None else budget_seconds, on_note or (lambda note: None))
    return _rows(drivers or tuple(DRIVERS), places(disk), runs, clones, clock, results)


def _rows(
    drivers: tuple[str, ...], where: list[Place], runs: int, clones: int, clock: Clock, results: Path | None
) -> Iterator[Row]:
    working = [driver for driver in drivers if _works(driver, clock)]
    from perilune.bench.harness import append  # With it comes torch, which takes its seconds.

    todo = [(driver, place) for driver in working for place in where]
    for number, (driver, place) in enumerate(todo):
        rest = 1 - 1 / (len(todo) - number)
        # The memory of clones is the same wherever snapshots lie.
        for samples in measured(driver, place, runs, clones if place is where[0] else 0, clock, rest):
            for row in rows(driver, place, samples):
                if results is not None:
                    append(results, row)
                yield row


def _works(driver: str, clock: Clock) -> bool:
    clock.note(f"{driver}: looking whether it works here", urgent=True)
    with (
        tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder,
        Sandboxes(Path(folder), sync="none") as sandboxes,
    ):
        probe = sandboxes.probe(driver)
    if not probe.passed:
        clock.tell(f"{driver} is left out: {probe.reason}")
    return probe.passed
