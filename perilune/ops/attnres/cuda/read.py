"""Reads over depth as CUDA kernels: for which calls, and their launches. See forward.cu and backward.cu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, unavailable_reason
from perilune.ops.native.rows import as_rows, fresh, parameter
from perilune.ops.triton.available import units
from perilune.ops.triton.sizes import blocks

MOST_SOURCES = 16
MOST_WIDTH = 8192
SHARED_BYTES = 227 * 1024  # of a Hopper multiprocessor, for its blocks together
RESERVED_BYTES = 1024  # of each block
AHEAD = 4  # rows of the next token that are under way while all of this one are held
LONGEST_RING = 24


class Plan(NamedTuple):
    """Threads of a block, pieces of a row that each owns, rows in shared memory, blocks a multiprocessor, bytes of a block."""

    threads: int
    vectors: int
    ring: int
    blocks: int
    shared_bytes: int


@cache
def plan(width: int, items: int, sources: int) -> Plan | None:
    """How blocks share a multiprocessor; None if not even one block's rows fit it.

    width: numbers of a row. items: rows of a token. sources: those that are mixed.
    """
    pieces = width // 8
    vectors = 1 if pieces <= 512 else 2
    threads = 32 * blocks(blocks(pieces, vectors), 32)
    row = 16 * vectors * threads
    scratch = 2 * (threads // 32) * (2 * sources + 2) * 4
    for count in range(max(1, 512 // (threads * vectors)), 0, -1):
        ring = min(LONGEST_RING, (SHARED_BYTES // count - RESERVED_BYTES * (count > 1) - scratch) // row)
        if count == 1 and sources > 2:  # measured: with more rows under way a call takes up to 4 % longer
            ring = min(ring, items + AHEAD)
        if ring >= items + (AHEAD if count > 1 else 1):
            return Plan(threads, vectors, ring, count, ring * row + scratch)
    return None


@cache
def kernel(name: str, width: int, sources: int, extra: int, given: bool, norm: bool, training: bool,
           query: bool = False) -> Kernel:  # fmt: skip
    """The kernel `name` for these macros. extra: rows of a token beside the sources: delta; dout and dtotal."""
    items = sources + extra
    layout = plan(width, items, sources)
    assert layout is not None, "asked for a kernel where `unsuitable` gives a reason"
    flags = {"HAS_TOTAL": extra - 1}
    if name == "forward":
        flags = {"HAS_DELTA": extra, "TRAINING": training, "HAS_QUERY": query}
    tables = "P" * sources + "q" * sources + ("" if name == "forward" else "P" * sources)
    return Kernel(
        Path(__file__).parent / f"{name}.cu",
        name,
        tables + ("PqPPPPPPPqff" if name == "forward" else "PqPqPPPPPPqf"),
        threads=layout.threads,
        shared_bytes=layout.shared_bytes,
        defines={
            "WIDTH": width, "THREADS": layout.threads, "VECTORS": layout.vectors, "ITEMS": items, "RING": layout.ring,
            "BLOCKS": layout.blocks, "SOURCES": sources, "GIVEN": int(given), "HAS_NORM": int(norm),
        } | {name: int(flag) for name, flag in flags.items()},
        early=name == "forward",
    )  # fmt: skip


def unsuitable(sources: Sequence[Tensor]) -> str | None:
    """Why the kernels do not take rows like these; None if they do."""
    first = sources[0]
    width = first.shape[-1]
    if first.dtype != torch.bfloat16:
        return f"the CUDA kernels read bfloat16, not {str(first.dtype).removeprefix('torch.')}"
    if len(sources) > MOST_SOURCES or width % 8 or width > MOST_WIDTH:
        return f"the CUDA kernels mix at most {MOST_SOURCES} rows of at most {MOST_WIDTH} numbers, a multiple of 8"
    if plan(width, len(sources) + 2, len(sources)) is None:
        return f"{len(sources)} rows of {width} numbers do not fit a multiprocessor's shared memory"
    for x in sources:
        if x.data_ptr() % 16 or not x.is_contiguous() and as_rows(x)[1] % 8:
            return "the CUDA kernels need rows that start at multiples of 16 bytes"
    return unavailable_reason(first.device)


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Rows that start at multiples of 16 bytes: `unsuitable` has not seen those of a gradient."""
    if x is None:
        return None, 0
    rows, stride = as_rows(x)
    if rows.data_ptr() % 16 or stride % 8:
        rows, stride = rows.clone(memory_format=torch.contiguous_format), x.shape[-1]
    return rows, stride


def floats(weight: Tensor | None) -> Tensor | None:
    """A parameter as the kernels read it: float32, at a multiple of 16 bytes."""
    if weight is None:
        return None
    weight = parameter(weight)
    return weight.clone() if weight.data_ptr() % 16 else weight


def forward(
    sources: Sequence[Tensor], delta: Tensor | None, score_weight_D: Tensor, eps: float, norm_weight_D: Tensor | None,
    norm_eps: float, training: bool = False, given: Tensor | None = None, query_D: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Launch the forward kernel.

    given: scores [rows] float32 of the first source, which is then a sum over a bank.
    query_D: the score weight is score_weight_D * query_D; None = it is score_weight_D.

    Returns:
        (running sum or None without delta, output, statistics [rows, 2 M + 1] for training: scores, rstd, and the logarithm
        of the softmax's denominator).
    """
    first, count = sources[0], len(sources)
    width = first.shape[-1]
    rows = first.numel() // width
    views, strides = zip(*[as_rows(x) for x in sources], strict=True)
    total = None if delta is None else fresh(first)
    out = fresh(first)
    statistics = torch.empty(rows, 2 * count + 1, device=first.device) if training else None
    run = kernel(
        "forward",
        width,
        count,
        int(delta is not None),
        given is not None,
        norm_weight_D is not None,
        training,
        query_D is not None,
    )
    run.launch(
        (_programs(run, rows, first.device),), *views, *strides, *_rows(delta), given, floats(score_weight_D),
        floats(query_D), floats(norm_weight_D), total, out, statistics, rows, eps, norm_eps,
    )  # fmt: skip
    return total, out, statistics


def backward(
    sources: Sequence[Tensor], dout: Tensor, dtotal: Tensor | None, statistics: Tensor, score_weight_D: Tensor,
    norm_weight_D: Tensor | None, norm_eps: float, given: bool = False, into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:  # fmt: skip
    """Launch the backward kernel. Returns the gradients of the score weight, the norm weight, the given scores, the sources.

    into: where the first source's gradient goes; None = memory of its own.
    """
    first, count = sources[0], len(sources)
    width, rows = first.shape[-1], len(statistics)
    views, strides = zip(*[as_rows(x) for x in sources], strict=True)
    gradients = [fresh(x) if into is None or i else into for i, x in enumerate(sources)]
    norm = norm_weight_D is not None
    run = kernel("backward", width, count, 1 + int(dtotal is not None), given, norm, False)
    programs = _programs(run, rows, first.device)
    dscore = torch.empty(programs, width, device=first.device)
    dnorm = torch.empty_like(dscore) if norm else None
    dgiven = torch.empty(rows, device=first.device) if given else None
    run.launch(
        (programs,), *views, *strides, *gradients, *_rows(dout), *_rows(dtotal), statistics, floats(score_weight_D),
        floats(norm_weight_D), dgiven, dscore, dnorm, rows, norm_eps,
    )  # fmt: skip
    dscore_D = dscore.sum(0).to(score_weight_D.dtype)
    return dscore_D, None if dnorm is None else dnorm.sum(0).to(norm_weight_D.dtype), dgiven, gradients


def _programs(run: Kernel, rows: int, device: torch.device) -> int:
    return min(rows, run.defines["BLOCKS"] * units(device))
