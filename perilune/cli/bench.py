"""`perilune bench`: measured speed, always beside a peer or a bound, in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.config.parse import parse_flags
from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.bench.harness import Row

SUITES = ("kernels", "train", "formats", "cache")


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """perilune bench {kernels,train,formats,cache}: rows with medians, spread, ratio to a peer and a bound from measured ceilings.

    Attributes:
        device: cpu | cuda.
        ops: kernels only: which operations; empty = all.
        peer: train only: transformers | none.
        experts: formats only: routed experts of a layer; more of them make a larger checkpoint.
        policies: cache only: retention policies to compare, dense | tail | turns | second-hit | interval:N, or joined by +;
            all = each of them and the default.
        budget: seconds after which no further row is begun; the next call goes on. 0 = all rows.
        results: .jsonl file to continue from and to append to; empty = benchmarks/results/SUITE-DEVICE.jsonl here.
        threads: CPU threads; 0 = all cores that this process may use.
        json: one JSON object on stdout.
    """

    device: str = "cpu"
    ops: tuple[str, ...] = ()
    peer: str = "transformers"
    experts: int = 8
    policies: tuple[str, ...] = ("all",)
    budget: float = 0.0
    results: Path | None = None
    threads: int = 0
    json: bool = False


def _measure(suite: str, flags: BenchFlags, results: Path, on_row: Callable[[Row], None]) -> list[Row]:
    budget = flags.budget or None
    if suite == "kernels":
        from perilune.bench import kernels

        return kernels.run(flags.device, budget, flags.ops or None, results=results, on_row=on_row)
    if suite == "formats":
        from perilune.bench import formats

        return formats.run(flags.device, budget, flags.experts, results=results, on_row=on_row)
    if suite == "cache":
        from perilune.bench import cache

        return cache.run(flags.device, budget, flags.policies, results=results, on_row=on_row)
    from perilune.bench import train

    return train.run(flags.device, budget, flags.peer, results=results, on_row=on_row)


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    suite = args[0] if args and not args[0].startswith("-") else ""
    if suite not in SUITES and "--help" not in args and "-h" not in args:
        raise ConfigError(f"bench needs one of {', '.join(SUITES)}; given: {suite or 'nothing'}")
    flags = parse_flags(
        BenchFlags, args[1:] if suite else args, BenchFlags(), prog="perilune bench", description=__doc__ or ""
    )
    import torch

    from perilune.train.precision import usable_cores

    torch.set_num_threads(flags.threads or usable_cores())
    results = flags.results or Path("benchmarks/results") / f"{suite}-{flags.device}.jsonl"
    rows = _measure(suite, flags, results, lambda row: print(_line(row), file=sys.stderr, flush=True))
    if flags.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        print(f"{len(rows)} rows; appended to {results}")
    return 0


def _line(row: Row) -> str:
    text = f"{row.name:<32} {row.ours_ms:>10.3f} ms"
    if row.peer_ms is not None:
        text += f"   {row.peer}: {row.peer_ms:.3f} ms, ratio {row.ratio:.2f}"
    if row.bound_ms:
        text += f"   bound {row.bound_ms:.3f} ms"
    if "peak_over_shard" in row.extra:
        text += f"   peak memory {row.extra['peak_over_shard']:.2f} of the largest file"
    if "saved_share" in row.extra:
        text += f"   saved {row.extra['saved_share']:.1%} of {row.extra['ideal_share']:.1%} prompt tokens"
        text += (
            f" (by recency {row.extra['saved_share_recency']:.1%}), {row.extra['checkpoints_created']:.0f} checkpoints"
        )
    return text
