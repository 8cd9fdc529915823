"""KDA over whole sequences on one GPU, in bfloat16: rows against flash-linear-attention, and where the time goes.

    python -m perilune.bench.gpu_kda [ROWS]         # where a call's time goes, and its peak memory, for rows whose names contain ROWS

Both sides run in one process on the same inputs, of which there are enough sets that none is still in the L2 cache when
its turn comes again. The peer runs with its own bounded gate on. FlashKDA cannot be installed from an index: a row's `extra`
has its recorded median, scaled by fla-core's time now over then where fla-core runs beside us.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perilune.bench.harness import Case, Row, peak_bytes
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda

DIM = 128
L2_BYTES = 60e6
SETTINGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
SOFTPLUS = {
    name: True for name in SETTINGS if name.endswith("_in_kernel")
}  # Kimi-Linear's gate: a decay without a bound
# B, T, H: forward medians recorded on one H200 for fla-core 0.6.0 and FlashKDA in one process (ms)
RECORDED: dict[tuple[int, int, int], tuple[float, float]] = {
    (1, 8192, 96): (2.611, 1.456),
    (1, 8192, 32): (1.567, 1.037),
    (8, 2048, 32): (1.852, 0.776),
    (1, 65_536, 32): (7.439, 8.076),
    (1, 65_536, 12): (3.726, 7.027),
    (1, 262_144, 12): (14.67, 28.23),
    (1, 8192, 64): (1.768, 1.238),
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


def forward(
    op: Callable[..., Any], sets: list[dict[str, Tensor]], settings: dict[str, Any] = SETTINGS
) -> Callable[[], Any]:
    """A call of the forward pass alone, on the next set of inputs."""
    turns = itertools.cycle(sets)

    def run() -> Any:
        with torch.no_grad():
            return op(**next(turns), **settings)

    return run


def training(
    op: Callable[..., Any], sets: list[dict[str, Tensor]], settings: dict[str, Any] = SETTINGS
) -> Callable[[], Any]:
    """A call of the forward and the backward pass for every input, on the next set."""
    turns = itertools.cycle([({n: x.requires_grad_() for n, x in s.items()}, torch.randn_like(s["v"])) for s in sets])

    def run() -> Any:
        leaves, cotangent = next(turns)
        o, _ = op(**leaves, **settings)
        return torch.autograd.grad(o, list(leaves.values()), cotangent)

    return run


def ours(**arguments: Any) -> Any:
    """The GPU kernels."""
    with force("triton"):
        return chunk_kda(**arguments)


def peer() -> Callable[..., Any] | None:
    """fla-core's chunk_kda; None if it is not installed."""
    try:
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError:
        return None
    return fla_chunk_kda


@dataclass(frozen=True, kw_only=True)
class RecordedCase(Case):
    """A row beside which a median from another process stands.

    Attributes:
        flash_ms: FlashKDA's recorded median; None = there is none.
        fla_ms: fla-core's, recorded with it.
    """

    flash_ms: float | None
    fla_ms: float

    def measure(self, device: str, samples: int) -> Row:
        """As `Case.measure`."""
        row = super().measure(device, samples)
        if self.flash_ms is None:
            return row
        scale = 1.0 if row.peer_ms is None else row.peer_ms / self.fla_ms
        return replace(row, extra=row.extra | {"flashkda_recorded_ms": self.flash_ms * scale})


def cases() -> Iterator[RecordedCase]:
    """Forward and forward+backward rows of every shape in `RECORDED`."""
    other = peer()
    for (batch, length, heads), (fla_ms, flash_ms) in RECORDED.items():
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

            yield RecordedCase(
                fla_ms=fla_ms,
                flash_ms=flash_ms if kind == "fwd" else None,
                name=f"kda_{kind}_bf16_B{batch}_T{length}_H{heads}_d{DIM}",
                shape=f"B {batch}, T {length}, H {heads}, d {DIM}, bounded gate",
                make=make,
                peer="" if other is None else "fla-core chunk_kda, safe gate",
                flops=tokens * sum(FLOPS[w] for w in works),
                bytes=tokens * sum(BYTES[w] for w in works),
                dtype=torch.bfloat16,
                precompile=() if other is None else (f"kda:{heads}",),
            )


def softplus_cases() -> Iterator[Case]:
    """Forward and forward+backward rows of the gate without a bound."""
    other = peer()
    for batch, length, heads in ((8, 2048, 32), (1, 8192, 32)):
        tokens = batch * length * heads
        for kind, timed, works in (("fwd", forward, ("fwd",)), ("fwdbwd", training, ("fwd", "bwd"))):

            def make(
                timed: Any = timed, shape: tuple[int, int, int] = (batch, length, heads), tokens: int = tokens
            ) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
                sets = [inputs(*shape, seed) for seed in range(int(4 * L2_BYTES // (tokens * 1026) + 2))]
                return timed(ours, sets, SOFTPLUS), None if other is None else timed(other, sets, SOFTPLUS)

            yield Case(
                name=f"kda_{kind}_softplus_bf16_B{batch}_T{length}_H{heads}_d{DIM}",
                shape=f"B {batch}, T {length}, H {heads}, d {DIM}, softplus gate",
                make=make,
                peer="" if other is None else "fla-core chunk_kda",
                flops=tokens * sum(FLOPS[w] for w in works),
                bytes=tokens * sum(BYTES[w] for w in works),
                dtype=torch.bfloat16,
                precompile=() if other is None else (f"kda_softplus:{heads}",),
            )


def kernel_times(run: Callable[[], Any], calls: int = 5) -> dict[str, float]:
    """Milliseconds a call spends in each kernel, longest first; of ours with what it waits for the one ahead, see `queued_ms`."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = {e.key: e.device_time_total / calls / 1e3 for e in record.key_averages() if e.device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


BUSY_CYCLES = 20_000_000  # some 10 ms, which no calls of one row take to queue


def queued_ms(run: Callable[[], Any], calls: int = 8) -> float:
    """Device time of a call behind others that were queued before it: kernels and what lies between them, no host."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def host_us(run: Callable[[], Any], calls: int = 9) -> float:
    """Microseconds until a call returns while the device is busy with something else."""
    found = []
    for _ in range(calls):
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        began = time.perf_counter()
        run()
        found.append(1e6 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return statistics.median(found)


def show_times(label: str, run: Callable[[], Any]) -> None:
    """The kernels' sum, a queued call, the host's time, peak memory and the time of each kernel, one line."""
    times = kernel_times(run)
    parts = "  ".join(f"{name[:24]} {ms:.3f}" for name, ms in itertools.islice(times.items(), 10))
    print(
        f"{label:38s} kernels {sum(times.values()):7.3f} ms  queued {queued_ms(run):7.3f} ms  host {host_us(run):4.0f} us  "
        f"+{peak_bytes(run) / 1e9:.2f} GB  {parts}",
        flush=True,
    )


if __name__ == "__main__":
    for case in itertools.chain(cases(), softplus_cases()):
        if "".join(sys.argv[1:2]) in case.name:
            show_times(case.name, case.make()[0])
