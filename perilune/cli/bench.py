"""`perilune bench`: measured speed, always beside a peer or a bound, in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.config.parse import parse_flags
from perilune.config.train import MAX_SEED, MAX_THREADS
from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.bench.harness import Row

SUITES = ("kernels", "train", "formats", "cache", "engine", "serve")


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """perilune bench {kernels,train,formats,cache,engine,serve}: rows with medians, spread, ratio to a peer and a bound from measured ceilings.

    Attributes:
        device: cpu | cuda.
        ops: kernels only: which operations; empty = all.
        peer: train only: transformers | none.
        experts: formats only: routed experts of a layer; more of them make a larger checkpoint.
        policies: cache only: retention policies to compare, dense | tail | turns | second-hit | interval:N, or joined by +;
            all = each of them and the default.
        trace: serve only: chat | agent | shared | mix | burst | abort, or all.
        url: serve only: a server that runs already; empty = one with random weights is started, and the same with a part
            switched off as the peer.
        api_key: serve only: of that server.
        preset: engine and serve only: of the model with random weights; empty = nano on a CPU, mini on a GPU.
        requests: serve only: of a trace.
        rate: serve only: arrivals a second; 0 = 2 on a CPU, 8 on a GPU.
        concurrency: serve only: clients that ask one request after the other, instead of arrivals by time; 0 = by time.
        seed: serve only: of the trace.
        plots: folder for pictures; of kernels and train the times beside their bounds and the ratios to peers, of cache
            and serve also what they are made from; empty = none.
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
    trace: tuple[str, ...] = ("all",)
    url: str = ""
    api_key: str = ""
    preset: str = ""
    requests: int = 32
    rate: float = 0.0
    concurrency: int = 0
    seed: int = 0
    plots: Path | None = None
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
        from perilune.bench import cache, cache_details

        rows = cache.run(flags.device, budget, flags.policies, results=results, on_row=on_row)
        if flags.plots is not None:
            cache_details.write_details(flags.plots)
            _draw_serving(flags.plots, results)
        return rows
    if suite == "engine":
        from perilune.bench import engine

        return engine.run(flags.device, budget, flags.preset, results=results, on_row=on_row)
    if suite == "serve":
        return _serve(flags, results, on_row)
    from perilune.bench import train

    return train.run(flags.device, budget, flags.peer, results=results, on_row=on_row)


def _serve(flags: BenchFlags, results: Path, on_row: Callable[[Row], None]) -> list[Row]:
    from perilune.bench import serve
    from perilune.bench.serve_process import ServerPlan

    scenarios = serve.SCENARIOS if flags.trace == ("all",) else flags.trace
    on_gpu = flags.device == "cuda"
    load = serve.LoadPlan(
        requests=flags.requests, rate=flags.rate or (8.0 if on_gpu else 2.0), concurrency=flags.concurrency, seed=flags.seed
    )  # fmt: skip
    # Several servers share a GPU: none of them may take most of its memory for its cache. No prompt is scored.
    plan = ServerPlan(
        preset=flags.preset or ("mini" if on_gpu else "nano"), dtype="bf16" if on_gpu else "fp32", threads=flags.threads,
        settings=(("cache_bytes", 2**33), ("warm_up", "fast")) if on_gpu else (),
    )  # fmt: skip
    rows = serve.run(
        flags.device, flags.budget or None, scenarios, load, plan, url=flags.url.rstrip("/"), key=flags.api_key,
        results=results, details=flags.plots, on_row=on_row,
    )  # fmt: skip
    if flags.plots is not None:
        _draw_serving(flags.plots, results.with_name(f"cache-{flags.device}.jsonl"))
    return rows


def _draw_serving(folder: Path, cache_rows: Path) -> None:
    from perilune.report.serving import draw

    for path in draw(folder, cache_rows=cache_rows):
        print(path, file=sys.stderr)


def _check(flags: BenchFlags) -> None:
    """ConfigError for a number that means nothing, before minutes are spent."""
    for name in ("budget", "rate", "concurrency"):
        if getattr(flags, name) < 0:
            raise ConfigError(f"--{name} {getattr(flags, name)} must not be negative")
    if flags.requests < 1:
        raise ConfigError(f"--requests {flags.requests} must be at least 1")
    if not 0 <= flags.threads <= MAX_THREADS:
        raise ConfigError(f"--threads {flags.threads} must lie in 0 (all cores) to {MAX_THREADS}")
    if not 0 <= flags.seed <= MAX_SEED:
        raise ConfigError(f"--seed {flags.seed} must lie in 0 to {MAX_SEED}")
    if flags.url and not flags.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {flags.url} must begin with http:// or https://")


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    suite = args[0] if args and not args[0].startswith("-") else ""
    if suite not in SUITES and "--help" not in args and "-h" not in args:
        raise ConfigError(f"bench needs one of {', '.join(SUITES)}; given: {suite or 'nothing'}")
    prog = f"perilune bench {suite if suite in SUITES else '{' + ','.join(SUITES) + '}'}"
    flags = parse_flags(BenchFlags, args[1:] if suite else args, BenchFlags(), prog=prog, description=__doc__ or "")
    _check(flags)
    import torch

    from perilune.train.precision import usable_cores

    torch.set_num_threads(flags.threads or usable_cores())
    results = flags.results or Path("benchmarks/results") / f"{suite}-{flags.device}.jsonl"
    rows = _measure(suite, flags, results, lambda row: print(_line(row), file=sys.stderr, flush=True))
    if flags.plots is not None and suite in ("kernels", "train"):
        from perilune.report.kernels import draw

        for path in draw(results, flags.plots, f"{suite}-"):
            print(path, file=sys.stderr)
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
    if "flashkda_recorded_ms" in row.extra:
        text += f"   FlashKDA, recorded: {row.extra['flashkda_recorded_ms']:.3f} ms"
    if "error_o" in row.extra:
        text += "   errors" + "".join(f" {n[6:]} {e:.1e}" for n, e in row.extra.items() if n.startswith("error_"))
    if "peer_error_o" in row.extra:
        worst = max(row.extra[n] / row.extra[f"peer_{n}"] for n in row.extra if n.startswith("error_"))
        text += f", at most {worst:.2f} of the peer's"
    if "mfu" in row.extra:
        text += f"   MFU {row.extra['mfu']:.1%}, peak +{row.extra['peak_bytes'] / 1e9:.1f} GB"
    if "peer_mfu" in row.extra:
        text += f" (peer {row.extra['peer_mfu']:.1%}, +{row.extra['peer_peak_bytes'] / 1e9:.1f} GB)"
    if "peak_over_shard" in row.extra:
        text += f"   peak memory {row.extra['peak_over_shard']:.2f} of the largest file"
    if "brought_back_ms" in row.extra:
        text += f"   brought back in {row.extra['brought_back_ms']:.1f} ms"
    if "score_difference" in row.extra:
        text += f"   scores differ by {row.extra['score_difference']:.1e} deviations"
    if "long_price" in row.extra:
        text += f"   long prompts take {row.extra['long_price']:.2f} times as long"
    if "p99_ms" in row.extra:
        text += f"   p90 {row.extra['p90_ms']:.1f}, p99 {row.extra['p99_ms']:.1f} ms"
    if "goodput_per_second" in row.extra:
        text += (
            f"   {row.extra['tokens_per_second']:.1f} tokens/s, {row.extra['goodput_per_second']:.2f} good requests/s"
        )
        text += f", {row.extra['hit_ratio']:.1%} of prompt tokens from the cache"
    if "saved_share" in row.extra:
        text += f"   saved {row.extra['saved_share']:.1%} of {row.extra['ideal_share']:.1%} prompt tokens"
        text += (
            f" (by recency {row.extra['saved_share_recency']:.1%}), {row.extra['checkpoints_created']:.0f} checkpoints"
        )
    return text
