"""KDA over whole sequences on one GPU, in bfloat16: rows against flash-linear-attention, and where the time goes.

    python -m perilune.bench.gpu_kda [--rows NAME] [--kernels | --versions] [--results FILE] [--budget SECONDS]

Both sides run in one process on the same inputs, of which there are enough sets that none is still in the L2 cache when
its turn comes again. The peer runs with its own bounded gate on. A row without a peer is printed where fla-core is not
installed (the recorded medians of `RECORDED` are then the only ones to look at).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench.harness import Case, Row, peak_bytes, run_suite
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda

VERSIONS: dict[str, dict[str, Any]] = {  # settings of ops/kda/triton/configs.py to choose between: docs/kernels-log.md
    "as they are": {},
    "wide summaries": {"SUMMARY": {"num_warps": 8, "num_stages": 3}, "SUMMARY_BLOCK": 128},
    "backward scan in 3 stages": {
        "SCAN_BACKWARD": ({"num_warps": 4, "num_stages": 2}, {"num_warps": 8, "num_stages": 3})
    },
}
DIM = 128
L2_BYTES = 60e6
SETTINGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
# B, T, H: what was recorded on one H200 for fla-core 0.6.0 forward, FlashKDA forward, fla-core forward + backward (ms)
RECORDED: dict[tuple[int, int, int], tuple[float, float | None, float | None]] = {
    (1, 8192, 96): (2.611, 1.456, 12.45),
    (1, 8192, 64): (1.768, 1.238, None),
    (1, 8192, 32): (1.28, 1.037, 4.54),
    (8, 2048, 32): (1.852, 0.776, 8.86),
    (1, 65_536, 32): (7.439, 8.076, 35.4),
    (1, 65_536, 12): (3.726, 7.027, 15.4),
    (1, 262_144, 12): (14.67, 28.23, None),
}
# A token of a head, chunks of 64: operations and bytes of an implementation that reads and writes everything once.
FLOPS = {"fwd": 6 * DIM**2 + 8 * 64 * DIM + 64**2, "bwd": 16 * DIM**2 + 22 * 64 * DIM}
BYTES = {"fwd": 1282, "bwd": 2308}


def inputs(batch: int, length: int, heads: int, seed: int) -> dict[str, Tensor]:
    """Raw logits as a layer passes them; half-lives from one token to some hundred."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    made = {name: normal(batch, length, heads, DIM) for name in ("q", "k", "v", "g")}
    made["g"] -= 1
    made["beta"] = normal(batch, length, heads)
    made["A_log"] = torch.rand(heads, device="cuda", generator=generator) / 2
    made["dt_bias"] = torch.randn(heads * DIM, device="cuda", generator=generator) / 10
    return made


def forward(op: Callable[..., Any], sets: list[dict[str, Tensor]]) -> Callable[[], Any]:
    """A call of the forward pass alone, on the next set of inputs."""
    turns = itertools.cycle(sets)

    def run() -> Any:
        with torch.no_grad():
            return op(**next(turns), **SETTINGS)

    return run


def training(op: Callable[..., Any], sets: list[dict[str, Tensor]]) -> Callable[[], Any]:
    """A call of the forward and the backward pass for every input, on the next set."""
    turns = itertools.cycle([({n: x.requires_grad_() for n, x in s.items()}, torch.randn_like(s["v"])) for s in sets])

    def run() -> Any:
        leaves, cotangent = next(turns)
        o, _ = op(**leaves, **SETTINGS)
        return torch.autograd.grad(o, list(leaves.values()), cotangent)

    return run


def ours(**arguments: Any) -> Any:
    """The Triton kernels."""
    with force("triton"):
        return chunk_kda(**arguments)


def peer() -> Callable[..., Any] | None:
    """fla-core's chunk_kda; None if it is not installed."""
    try:
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError:
        return None
    return fla_chunk_kda


def cases() -> Iterator[Case]:
    """Forward and forward+backward rows of every shape in `RECORDED`."""
    other = peer()
    for batch, length, heads in RECORDED:
        tokens = batch * length * heads
        for kind, timed, works in (("fwd", forward, ("fwd",)), ("fwdbwd", training, ("fwd", "bwd"))):
            if kind == "fwdbwd" and length > 65_536:
                continue

            def make(
                timed: Any = timed, shape: tuple[int, int, int] = (batch, length, heads), tokens: int = tokens
            ) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
                count = int(min(8, 4 * L2_BYTES // (tokens * 1026) + 2))
                sets = [inputs(*shape, seed) for seed in range(count)]
                return timed(ours, sets), None if other is None else timed(other, sets)

            yield Case(
                name=f"kda_{kind}_bf16_B{batch}_T{length}_H{heads}_d{DIM}",
                shape=f"B {batch}, T {length}, H {heads}, d {DIM}, bounded gate",
                make=make,
                peer="" if other is None else "fla-core chunk_kda, safe gate",
                flops=tokens * sum(FLOPS[w] for w in works),
                bytes=tokens * sum(BYTES[w] for w in works),
                dtype=torch.bfloat16,
            )


def kernel_times(run: Callable[[], Any], calls: int = 5) -> dict[str, float]:
    """Milliseconds a call spends in each kernel, longest first."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = {e.key: e.device_time_total / calls / 1e3 for e in record.key_averages() if e.device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@contextmanager
def configured(settings: dict[str, Any]) -> Iterator[None]:
    """Within the block the launch settings are these."""
    from perilune.ops.kda.triton import configs

    before = {name: getattr(configs, name) for name in settings}
    for name, value in settings.items():
        setattr(configs, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(configs, name, value)


def show_kernels(label: str, run: Callable[[], Any]) -> None:
    """Time of each kernel and peak memory, one line."""
    times = kernel_times(run)
    parts = "  ".join(f"{name[:24]} {ms:.3f}" for name, ms in itertools.islice(times.items(), 10))
    print(f"{label:44s} {sum(times.values()):8.3f} ms +{peak_bytes(run) / 1e9:.2f} GB  {parts}", flush=True)


def show(row: Row) -> None:
    """One line a row."""
    against = "" if row.peer_ms is None else f"  peer {row.peer_ms:8.3f} ms  x{row.ratio:.2f}"
    print(f"{row.name:44s} {row.ours_ms:8.3f} ms  bound {row.bound_ms:.3f} ms{against}", flush=True)


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="KDA kernels on one GPU, against fla-core where it is installed")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--kernels", action="store_true", help="time of each kernel and peak memory instead of rows")
    parser.add_argument("--versions", action="store_true", help="the same for each set of launch settings")
    parser.add_argument("--results", type=Path, help="a .jsonl file to continue from and to append to")
    parser.add_argument("--budget", type=float, help="begin no row after this many seconds")
    flags = parser.parse_args()
    chosen = [case for case in cases() if flags.rows in case.name]
    if not (flags.kernels or flags.versions):
        run_suite(chosen, device="cuda", budget_seconds=flags.budget, results=flags.results, on_row=show)
        return
    for case in chosen:
        run, _ = case.make()
        if flags.kernels:
            show_kernels(case.name, run)
            continue
        print(case.name, flush=True)
        for version, settings in VERSIONS.items():
            try:
                with configured(settings):
                    show_kernels("  " + version, run)
            except Exception as error:  # too many registers or too much shared memory: the others still run
                print(f"  {version}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
