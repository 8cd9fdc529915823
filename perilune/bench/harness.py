"""Time our code against a peer in the same process, and keep the rows.

Ours and the peer run alternately, so a neighbour on the machine slows both; medians and the spread are kept. Every row
also carries a bound: the time in which this machine, as measured now with a plain copy and a plain matrix product,
would do the case's bytes and floating-point operations. `ratio` = our speed / the peer's speed: above 1 we are faster.

A budget stops a suite between two rows; with a results file, rows already in it for the same code and machine are not
measured again, so calling once more continues.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from perilune import __version__
from perilune.bench.precompile import precompile
from perilune.errors import ConfigError
from perilune.ops.native.blas import multiplies_bf16

PEERS = ("transformers", "fla", "torchao")
SAMPLES = 9
MIN_SAMPLES = 3
ROW_SECONDS = 4.0  # stop sampling a row after this, once MIN_SAMPLES are in
SAMPLE_SECONDS = (
    2e-3  # shorter calls are repeated inside a sample, or the clock and the call overhead would be measured
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to measure.

    Attributes:
        name: row name, e.g. `kda_fwd_B4_T512_H4_d64`.
        shape: the sizes, for the reader.
        make: builds the inputs and returns what to time: `(ours, peer or None)`, both without arguments.
        peer: what the peer is.
        flops, bytes: work of an ideal implementation; 0 = not counted.
        dtype: of the matrix products, chooses the matmul ceiling.
        precompile: tasks of `bench.precompile` for the peer's kernels, done once in a run of a suite.
    """

    name: str
    shape: str
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any] | None]]
    peer: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    dtype: torch.dtype = torch.float32
    precompile: tuple[str, ...] = ()

    def measure(self, device: str, samples: int) -> Row:
        """Warm up, then sample ours and the peer in turn."""
        return _measured(self, device, samples)


class Measurable(Protocol):
    """What a suite is made of."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> str: ...

    def measure(self, device: str, samples: int) -> Row:
        """Time it."""
        ...


class Work(Protocol):
    """What a bound is computed from; see `Case`."""

    @property
    def flops(self) -> float: ...

    @property
    def bytes(self) -> float: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured row; times in milliseconds, medians with the least and the largest sample; `extra` has other quantities."""

    name: str
    shape: str
    ours_ms: float
    peer: str
    peer_ms: float | None
    ratio: float | None
    bound_ms: float | None
    device: str
    versions: dict[str, str]
    commit: str
    ours_spread_ms: tuple[float, float]
    peer_spread_ms: tuple[float, float] | None
    samples: int
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    extra: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the attributes as keys."""
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Row:
        """The inverse of `to_json`.

        Raises:
            ConfigError: a key is missing or unknown.
        """
        try:
            spreads = {
                key: None if record[key] is None else tuple(record[key]) for key in ("ours_spread_ms", "peer_spread_ms")
            }
            return Row(**(record | spreads))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a benchmark row: {error}; remove that line from the results file") from error


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _seconds(run: Callable[[], Any], repeats: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def peak_bytes(run: Callable[[], Any]) -> int:
    """CUDA memory that a call needs at its peak beyond what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@lru_cache
def copy_ceiling(device: str) -> float:
    """Bytes a second, read and written, of a copy that does not fit into a cache."""
    source = torch.ones(1 << (28 if device.startswith("cuda") else 24), device=device)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source), 1, device) for _ in range(7))
    return 2 * source.numel() * source.element_size() / best


@lru_cache
def matmul_ceiling(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a square matrix product."""
    size = 8192 if device.startswith("cuda") else 1024
    # Random numbers: on ones a GPU draws less power and runs faster than on anything that a model holds.
    a = torch.randn(size, size, device=device).to(dtype)
    best = min(_seconds(lambda: a @ a, 1, device) for _ in range(7))
    return 2 * size**3 / best


def bound_ms(case: Work, device: str) -> float | None:
    """The larger of the case's bytes at the copy ceiling and its operations at the matmul ceiling, in milliseconds."""
    times = []
    if case.bytes:
        times.append(case.bytes / copy_ceiling(device))
    if case.flops:
        times.append(case.flops / matmul_ceiling(device, case.dtype))
    return 1e3 * max(times) if times else None


def work_done(case: Work, device: str) -> dict[str, float]:
    """What the bound was computed from, for a row's `extra`: a picture needs bytes, operations and both ceilings."""
    found = {}
    if case.bytes:
        found |= {"bytes": case.bytes, "copy_bytes_per_second": copy_ceiling(device)}
    if case.flops:
        found |= {"flops": case.flops, "matmul_flops_per_second": matmul_ceiling(device, case.dtype)}
    return found


@lru_cache
def device_name(device: str) -> str:
    """The device in words, for a CPU with its instructions and the thread count: a virtual machine's name alone tells no two apart."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    instructions = torch.backends.cpu.get_cpu_capability() + (" with bf16" if multiplies_bf16() else "")
    return f"{model}, {instructions}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions that a time depends on, those of imported peers included."""
    found = {"perilune": __version__, "python": platform.python_version(), "torch": torch.__version__}
    with suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    found |= {peer: sys.modules[peer].__version__ for peer in PEERS if peer in sys.modules}
    return found


@lru_cache
def commit() -> str:
    """Short hash of the checked-out commit, with `+` if files differ from it; `unknown` outside a checkout."""
    folder = Path(__file__).parents[2]
    try:
        run = [
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30, check=True)
            for words in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "perilune"),
            )
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")


def _measured(case: Case, device: str, samples: int) -> Row:
    ours, peer = case.make()
    runs = [ours] if peer is None else [ours, peer]
    repeats = []
    for run in runs:
        run()  # compiles, fills caches, starts thread pools
        once = _seconds(run, 1, device)
        repeats.append(max(1, min(10_000, math.ceil(SAMPLE_SECONDS / max(once, 1e-9)))))
    times: list[list[float]] = [[] for _ in runs]
    enabled = gc.isenabled()
    gc.disable()  # a collection inside a sample would be charged to whoever runs then
    try:
        start = time.perf_counter()
        while len(times[0]) < samples:
            for run, repeat, found in zip(runs, repeats, times):
                found.append(1e3 * _seconds(run, repeat, device))
            if len(times[0]) >= MIN_SAMPLES and time.perf_counter() - start > ROW_SECONDS:
                break
    finally:
        if enabled:
            gc.enable()
    medians = [statistics.median(found) for found in times]
    extra = work_done(case, device)
    if device.startswith("cuda"):
        extra |= dict(
            zip(("peak_bytes", "peer_peak_bytes"), (getattr(r, "peak_bytes", None) or peak_bytes(r) for r in runs))
        )
    return Row(
        name=case.name,
        shape=case.shape,
        ours_ms=medians[0],
        peer=case.peer,
        peer_ms=medians[1] if peer else None,
        ratio=medians[1] / medians[0] if peer else None,
        bound_ms=bound_ms(case, device),
        device=device_name(device),
        versions=versions(),
        commit=commit(),
        ours_spread_ms=(min(times[0]), max(times[0])),
        peer_spread_ms=(min(times[1]), max(times[1])) if peer else None,
        samples=len(times[0]),
        extra=extra,
    )


def run_suite(
    cases: Iterable[Measurable],
    *,
    device: str = "cpu",
    budget_seconds: float | None = None,
    results: Path | None = None,
    samples: int = SAMPLES,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the cases in order until the budget is spent.

    Args:
        cases: rows to measure; their inputs are built one at a time.
        device: "cpu" or "cuda".
        budget_seconds: no row is begun after this many seconds; None = all rows.
        results: a .jsonl file; rows found there for this commit, device and these versions are taken from it, new rows
            are appended as they are measured.
        samples: of each row.
        on_row: called with each row as it is ready, those from the file included.

    Returns:
        The rows that are done, in the order of the cases.

    Raises:
        ConfigError: the results file holds something else.
    """
    end = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
    done, rows, compiled = known(results, device), [], set()
    for case in cases:
        row = done.get((case.name, case.shape))
        if row is None:
            tasks = [task for task in getattr(case, "precompile", ()) if task not in compiled]
            if tasks and time.monotonic() < end:
                compiled.update(tasks)
                for problem in precompile(*tasks, seconds=end - time.monotonic()):
                    print(problem, file=sys.stderr, flush=True)
            if time.monotonic() >= end:
                continue  # later cases may still be in the file
            row = case.measure(device, samples)
            if results is not None:
                append(results, row)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows


def append(results: Path, row: Row) -> None:
    """Add one line to a results file; the folder is made if needed, and a line cut off by a kill is dropped first."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a+b") as file:
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(row.to_json()).encode() + b"\n")


def read(results: Path) -> list[Row]:
    """The rows of a results file; a last line that was cut off while being written is left out.

    Raises:
        ConfigError: the file cannot be read, or a line is not a row.
    """
    try:
        text = results.read_text(encoding="utf-8") if results.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{results} is no results file ({error}); choose another --results") from error
    rows, lines, whole = [], text.splitlines(), text.endswith("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not whole:
                break
            raise ConfigError(f"{results}, line {number} is not JSON ({error}); remove it") from error
        rows.append(Row.from_json(record))
    return rows


def known(results: Path | None, device: str) -> dict[tuple[str, str], Row]:
    """Rows of a results file that were measured with this code on this machine, by name and shape."""
    if results is None:
        return {}
    here = (device_name(device), versions(), commit())
    return {(r.name, r.shape): r for r in read(results) if (r.device, r.versions, r.commit) == here}
