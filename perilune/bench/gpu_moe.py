"""Rows of the routed experts, the router and the balancer's histogram on a GPU.

    python -m perilune.bench.gpu_moe [RESULTS.jsonl]

The experts' peer is torch's own chain: rows sorted by expert, `torch._grouped_mm` for each product, SiTU-GLU as a kernel of
its own (ours, which is kinder to the peer than a dozen element-wise ones), `index_add` into the tokens in float32. It
keeps what autograd keeps; with `_recompute` it saves as little as ours does. The router's peer is sigmoid, `torch.topk`
and gather, with the counts that the balancer needs; the histogram's is `torch.bincount`.

K3's shape is that of one GPU of an expert-parallel group: 56 of the 896 experts, 512 rows each. A row's bound is its
operations at the rate of a large bf16 product of random numbers, and its bytes at copy speed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from perilune.bench.graphs import graph_times
from perilune.bench.harness import Row, append, commit, copy_ceiling, device_name, versions
from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.moe import route, routed_experts
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.ops.situ_glu import situ_glu

K3 = (1792, 3584, 3072, 56, 16)  # N, L, F, E, A
MINI = (8192, 512, 512, 64, 8)
EXPERTS = {"k3": K3, "mini": MINI}
ROUTER = (8192, 896, 16)  # N, E, A
SAMPLES = 12


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@cache
def matmul_rate() -> float:
    """Operations a second of a bf16 product of random 8192 x 8192 matrices."""
    a, b = _normal(8192, 8192), _normal(8192, 8192)
    return 2 * 8192**3 / (1e-3 * statistics.median(graph_times([lambda: a @ b] * 4, SAMPLES)))


def _direct_times(call: Callable[[], object], calls: int = 3) -> list[float]:
    """As `graph_times`, for a call that no graph can hold because it waits for the device."""
    call()
    times = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return times


def _row(
    name: str, shape: str, ours: Callable, flops: float, moved: float, peer: str, theirs: Callable, waits: bool = False
) -> Row:
    mine = graph_times([ours] * 2, SAMPLES)
    others = _direct_times(theirs) if waits else graph_times([theirs] * 2, SAMPLES)
    median, peer_median = statistics.median(mine), statistics.median(others)
    bound = 1e3 * max(flops / matmul_rate(), moved / copy_ceiling("cuda"))
    return Row(
        name=name, shape=shape, ours_ms=median, peer=peer, peer_ms=peer_median, ratio=peer_median / median, bound_ms=bound,
        device=device_name("cuda"), versions=versions(), commit=commit(), ours_spread_ms=(min(mine), max(mine)),
        peer_spread_ms=(min(others), max(others)), samples=len(mine),
        extra={"share_of_matmul_rate": flops / matmul_rate() / (1e-3 * median)} if flops else {},
    )  # fmt: skip


def grouped_mm_chain(z: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The routed experts of torch's own parts, without a wait for the device."""
    order = torch.argsort(index.flatten(), stable=True)
    token = order // index.shape[1]
    experts = torch.arange(len(w1), device=z.device)
    ends = torch.searchsorted(index.flatten()[order], experts, right=True).to(torch.int32)
    x = z[token]
    h = situ_glu(*(torch._grouped_mm(x, w.transpose(1, 2), offs=ends) for w in (w1, w3)))
    y = torch._grouped_mm(h, w2.transpose(1, 2), offs=ends)
    out = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    return out.index_add(0, token, y * weight.flatten()[order, None]).to(z.dtype)


def _recomputed(*args: Tensor) -> Tensor:
    return checkpoint(grouped_mm_chain, *args, use_reentrant=False, preserve_rng_state=False)


def _forward(function: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return function(*args)

    return run


def _both(function: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    args = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    cotangent = torch.randn_like(args[0])
    wanted = [a for a in args if a.requires_grad]
    return lambda: torch.autograd.grad(function(*args), wanted, cotangent)


def expert_operands(tokens: int, width: int, hidden: int, experts: int, active: int) -> list[Tensor]:
    """Tokens, even routes, mixing weights and the experts' matrices in bf16."""
    index = torch.rand(tokens, experts, device="cuda").topk(active).indices
    w1, w3 = (_normal(experts, hidden, width) / width**0.5 for _ in range(2))
    mixing = torch.rand(tokens, active, device="cuda") / active
    return [_normal(tokens, width), index, mixing, w1, w3, _normal(experts, width, hidden) / hidden**0.5]


def experts(name: str) -> list[Row]:
    """Forward, and forward with backward, at one shape."""
    tokens, width, hidden, count, active = EXPERTS[name]
    args = expert_operands(*EXPERTS[name])
    shape = f"N={tokens} L={width} F={hidden} E={count} A={active} bf16, {tokens * active // count} rows an expert"
    product = 2.0 * tokens * active * width * hidden
    weights = 2.0 * 3 * count * width * hidden
    peer, rows = "torch._grouped_mm, SiTU kernel, index_add", []
    for kind, wrap, theirs, products, reads in (
        ("fwd", _forward, grouped_mm_chain, 3, 1),
        ("fwdbwd", _both, grouped_mm_chain, 9, 3),
        ("fwdbwd_recompute", _both, _recomputed, 9, 3),
    ):
        rows.append(
            _row(f"moe_experts_{kind}_{name}", shape, wrap(routed_experts, args), products * product, reads * weights,
                 peer + (" under activation checkpointing" if theirs is _recomputed else ""), wrap(theirs, args))
        )  # fmt: skip
    return rows


def router() -> list[Row]:
    """Routing with its counts, and the histogram of quantile balancing, at K3's size."""
    tokens, count, active = ROUTER
    logits, bias = _normal(tokens, count, dtype=torch.float32), _normal(count, dtype=torch.float32) / 10
    shape = f"N={tokens} E={count} A={active} fp32"

    def ours() -> object:
        with torch.no_grad():
            return route(logits, bias, active)

    def theirs() -> object:
        scores = torch.sigmoid(logits)
        top = torch.topk(scores + bias, active + 1)
        weight = scores.gather(-1, top.indices[:, :active])
        counts = torch.zeros(count, dtype=torch.int64, device="cuda")
        counts.index_add_(
            0, top.indices[:, :active].flatten(), torch.ones(tokens * active, dtype=torch.int64, device="cuda")
        )
        return weight / weight.sum(-1, keepdim=True), counts

    routing = route(logits, bias, active)
    mine, plain = QuantileHistogram(count, active), QuantileHistogram(count, active)
    nothing = torch.zeros(count, dtype=torch.int64, device="cuda")
    seen = routing.scores_NE, routing.cutoff_N, None, nothing, bias

    def torchs() -> None:
        with force("torch"):
            plain.observe(*seen)

    size = 4 * tokens * count
    return [
        _row("moe_router", shape, ours, 0, 2 * size, "sigmoid, torch.topk, gather, counts", theirs),
        _row("moe_histogram", shape, lambda: mine.observe(*seen), 0, size, "torch.bincount", torchs, waits=True),
    ]


def report(row: Row, results: Path | None) -> None:
    """Print a row, and append it to the file."""
    assert row.bound_ms is not None and row.peer_ms is not None, "every row here has a bound and a peer"
    share = row.extra.get("share_of_matmul_rate")
    part = f"{row.bound_ms / row.ours_ms:.0%} of copy speed" if share is None else f"{share:.0%} of the matmul rate"
    print(
        f"{row.name}: {1e3 * row.ours_ms:.1f} us, {part}; {row.peer}: {1e3 * row.peer_ms:.1f} us, ratio {row.ratio:.2f}",
        flush=True,
    )
    if results is not None:
        append(results, row)


def run(results: Path | None = None) -> list[Row]:
    """Measure all rows; print them and append them to `results`.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("these rows need a CUDA device; torch sees none")
    rows = []
    for part in (router, lambda: experts("k3"), lambda: experts("mini")):
        for row in part():
            report(row, results)
            rows.append(row)
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
