"""Where chunks and segments lie, as small integer tables on the device, built once for a set of sequence lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
LEAST_SEGMENT = 32  # chunks: finding a segment's effect costs as much as running it, a shorter one would not pay


class Steps(NamedTuple):
    """What the serial kernels take, in microseconds, measured on one H200 (docs/kernels-log.md).

    Attributes:
        scan: a chunk of the scan, by the value channels of a program.
        summary: a chunk of a segment's effect, 128 columns.
        fold: a segment of the fold.
        scan_bytes: the memory's part of a chunk of a head, which many programs at once cannot undercut.
        summary_bytes: likewise.
    """

    scan: dict[int, float]
    summary: float
    fold: float
    scan_bytes: float
    summary_bytes: float


CUDA = Steps(scan={128: 2.08, 64: 1.36}, summary=1.22, fold=5.0, scan_bytes=0.024, summary_bytes=0.012)
TRITON = Steps(scan={128: 3.5, 64: 2.9}, summary=2.5, fold=5.0, scan_bytes=0.031, summary_bytes=0.03)


class Filling:
    """A copy to a device that nobody waited for: work on its own stream comes behind it, other streams have to wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._done: torch.cuda.Event | None = torch.cuda.Event()
        self._done.record(self._stream)

    def wait(self) -> None:
        """Make the current stream wait, if there is something to wait for."""
        done = self._done
        if done is None or torch.cuda.is_current_stream_capturing():  # a recording begins when nothing is under way
            return
        if done.query():
            self._done = None
        else:
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                current.wait_event(done)


@dataclass(frozen=True)
class Plan:
    """Tables over the flattened tokens.

    Attributes:
        chunks: int32 `[chunks, 2]`, first token and number of tokens.
        units: int32 `[units, 6]`, first chunk, chunks, first token, end of its tokens, the sequence that this unit
            begins and the one that it ends (-1: none). Units of one sequence follow each other.
        sequences: int32 `[N, 2]`, first unit and units.
        split: True if a sequence has more than one unit.
        width: value channels of a head that a program of the serial kernels takes.
        full: every chunk has 64 tokens, so that they follow each other.
        filling: until when another stream may not read the tables; None for those that the caller fills.
    """

    chunks: Tensor
    units: Tensor
    sequences: Tensor
    split: bool
    width: int
    full: bool = False
    filling: Filling | None = None

    @property
    def chunk_count(self) -> int:
        return self.chunks.shape[0]

    @property
    def unit_count(self) -> int:
        return self.units.shape[0]


class Tables(NamedTuple):
    """The tables of `Plan` as int32 arrays."""

    chunks: np.ndarray
    units: np.ndarray
    sequences: np.ndarray


def only_whole_chunks(offsets: tuple[int, ...]) -> bool:
    """Whether no sequence ends within a chunk."""
    return not any(offset % CHUNK for offset in offsets)


def tables(offsets: tuple[int, ...], target: int) -> Tables:
    """Cut the sequences with boundaries `offsets` into chunks and into segments of at least `target` chunks."""
    bounds = np.asarray(offsets, dtype=np.int64)
    begin_N, end_N = bounds[:-1], bounds[1:]
    count_N = -(-(end_N - begin_N) // CHUNK)
    pieces_N = np.maximum(1, count_N // target)
    sequence, step = _ranges(count_N)
    start = begin_N[sequence] + CHUNK * step
    chunks = np.stack((start, np.minimum(CHUNK, end_N[sequence] - start)), 1)
    of, piece = _ranges(pieces_N)
    low, high = (at * count_N[of] // pieces_N[of] for at in (piece, piece + 1))
    first_N = np.cumsum(count_N) - count_N
    begins, ends = (np.where(piece == edge, of, -1) for edge in (0, pieces_N[of] - 1))
    units = np.stack((first_N[of] + low, high - low, begin_N[of] + low * CHUNK, end_N[of], begins, ends), 1)
    sequences = np.stack((np.cumsum(pieces_N) - pieces_N, pieces_N), 1)
    return Tables(*(table.astype(np.int32) for table in (chunks, units, sequences)))


def _ranges(count_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For range(count) of every n, one behind the other: n, and the number in its range."""
    owner = np.repeat(np.arange(len(count_N)), count_N)
    return owner, np.arange(len(owner)) - (np.cumsum(count_N) - count_N)[owner]


_recorded: dict[int, Tensor] = {}  # a recorded CUDA graph reads its tables for as long as it lives


def plan(offsets: tuple[int, ...], target: int, width: int, device: torch.device) -> Plan:
    """Cut the sequences with boundaries `offsets` into chunks and into segments.

    Args:
        offsets: N+1 token boundaries.
        target: chunks of a segment, at least; a sequence shorter than two of them stays whole.
        width: see `Plan`.
        device: of the tables.
    """
    found = _plan(offsets, target, width, device)
    if found.filling is not None:
        found.filling.wait()
    keep_if_recorded(found.chunks)
    return found


def keep_if_recorded(table: Tensor) -> None:
    """Keep a table, and all that lies in the same memory, for good if the current stream is being recorded."""
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        _recorded[id(table)] = table


def on_device(numbers: np.ndarray, device: torch.device) -> tuple[Tensor, Filling | None]:
    """The numbers on a device, and until when another stream may not read them."""
    table = torch.from_numpy(numbers)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return table.to(device), None
    # From pinned memory, which torch keeps until it is read: the host goes on. A recording would hold the copy, not make it.
    return table.pin_memory().to(device, non_blocking=True), Filling(device)


@lru_cache(maxsize=64)
def _plan(offsets: tuple[int, ...], target: int, width: int, device: torch.device) -> Plan:
    found = tables(offsets, target)
    begins = list(accumulate((-(-table.size // 4) * 4 for table in found), initial=0))  # multiples of 16 bytes
    flat = np.zeros(begins[-1], np.int32)
    for begin, table in zip(begins, found):
        flat[begin : begin + table.size] = table.ravel()
    numbers, filling = on_device(flat, device)
    parts = (numbers[begin : begin + table.size].view(table.shape) for begin, table in zip(begins, found))
    chunks, units, sequences = parts
    return Plan(chunks, units, sequences, len(units) > len(sequences), width, only_whole_chunks(offsets), filling)


@lru_cache(maxsize=64)
def fastest(
    offsets: tuple[int, ...], heads: int, value_dim: int, key_dim: int, in_cuda: bool, slots: int
) -> tuple[int, int]:
    """The `target` and `width` that should take least time.

    Args:
        offsets: N+1 token boundaries.
        heads: value heads.
        value_dim: value channels of a head.
        key_dim: key channels.
        in_cuda: whether the CUDA kernels run, else the Triton ones.
        slots: programs that the device runs at once.
    """
    counts = Counter(-(-(end - begin) // CHUNK) for begin, end in pairwise(offsets))
    total, longest = sum(length * n for length, n in counts.items()), max(counts)
    steps, columns = CUDA if in_cuda else TRITON, max(1, (value_dim + key_dim) // 128)
    widths = [w for w in steps.scan if w <= value_dim and (in_cuda or w == min(value_dim, 128))] or [value_dim]

    def time(width: int, target: int) -> float:
        scanned, summaries, pieces = Counter[int](), Counter[int](), 1
        for length, n in counts.items():
            cuts = _cuts(length, target)
            pieces = max(pieces, len(cuts) - 1)
            sizes = [high - low for low, high in pairwise(cuts)]
            for place, size in enumerate(sizes):
                scanned[size] += n * heads * (value_dim // width)
                if place < len(sizes) - 1:  # the first one needs no M, the last one nothing
                    summaries[size] += n * heads * (columns if place else -(-columns // 2))
        found = max(steps.scan.get(width, 1.0) * _makespan(scanned, slots), steps.scan_bytes * total * heads)
        if pieces > 1:
            work = sum(size * n for size, n in summaries.items()) / columns
            found += max(steps.summary * _makespan(summaries, slots), steps.summary_bytes * work) + steps.fold * pieces
        return found

    options = []
    for width in widths:
        enough = total * heads * (value_dim // width) >= longest * slots  # whole sequences fill the device
        most = 1 if enough else max(1, min(slots, longest // LEAST_SEGMENT))
        targets = {max(1, longest // n) for n in range(1, most + 1)}
        options += [(time(width, target), -width, -target) for target in targets]
    _, width, target = min(options)  # of equals the widest, the fewest cuts
    return -target, -width


def _makespan(programs: Counter[int], slots: int) -> int:
    """Chunks until all are done, if programs of these lengths start in waves, the longest ones first."""
    done = before = 0
    for length, n in sorted(programs.items(), reverse=True):
        done += length * (-(-(before + n) // slots) - -(-before // slots))
        before += n
    return done


def _cuts(count: int, target: int) -> list[int]:
    """Boundaries of the segments of a sequence of `count` chunks."""
    pieces = max(1, count // target)
    return [piece * count // pieces for piece in range(pieces + 1)]
