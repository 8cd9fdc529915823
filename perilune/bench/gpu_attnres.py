"""Rows of reads over depth and of the element-wise kernels on a GPU, at K3's sizes.

    python -m perilune.bench.gpu_attnres [RESULTS.jsonl]

The peer of a read, where fla-core can be imported, is its `fused_attnres`; that of a read with the running-sum add and the
output norm is the add and the same function with its own output norm. A row's bound is its least traffic at copy speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from perilune.bench.gpu_decode import make_row, report
from perilune.bench.harness import Row
from perilune.errors import ConfigError
from perilune.ops.attnres import merge, mix, phase_one, read, triton_mix
from perilune.ops.choice import force
from perilune.ops.norm import gated_rms_norm
from perilune.ops.short_conv import short_conv
from perilune.ops.situ_glu import situ_glu

TOKENS, WIDTH, EPS = 8192, 7168, 1e-5
SITES = 24  # reads that share the finished blocks: 12 layers of two
PEER = "fla-core"


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of `function` for a fixed cotangent."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    cotangent = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, cotangent)


def _without_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    return run


def _peer_mix(norm_weight: Tensor | None = None) -> Callable[..., Tensor] | None:
    with suppress(ImportError):
        from fla.ops.attnres import fused_attnres

        ones = torch.ones(WIDTH, device="cuda")
        return lambda c, *sources: fused_attnres(c, list(sources), ones, norm_weight, rms_eps=EPS)
    return None


def reads(bank: int) -> list[Row]:
    """Rows of single reads of a bank and a running sum."""
    unit, shape = 2 * TOKENS * WIDTH, f"n={bank} T={TOKENS} D={WIDTH} bf16"
    c, norm_weight = _normal(WIDTH, dtype=torch.float32) / 85, _normal(WIDTH, dtype=torch.float32)
    sources, delta = [_normal(TOKENS, WIDTH) for _ in range(bank + 1)], _normal(TOKENS, WIDTH)
    inputs = [c, *sources]

    def ours(c: Tensor, *sources: Tensor) -> Tensor:
        return mix(sources, c, EPS)

    def fused(c: Tensor, delta: Tensor, *sources: Tensor) -> Tensor:
        return read(sources[:-1], sources[-1], delta, c, EPS, norm_weight, EPS)[0]

    theirs, normed = _peer_mix(), _peer_mix(norm_weight)

    def added(c: Tensor, delta: Tensor, *sources: Tensor) -> Tensor:
        assert normed is not None, "only called where the peer was found"
        return normed(c, *sources[:-1], sources[-1] + delta)

    def both(wrap: Callable, function: Callable, peer: Callable | None, inputs: list[Tensor]) -> tuple[list, list]:
        return [wrap(function, inputs)], [] if peer is None else [wrap(peer, inputs)]

    rows = []
    for name, wrap, pair, traffic in (
        ("fwd", _without_gradients, (ours, theirs, inputs), bank + 2),
        ("fwdbwd", _gradients, (ours, theirs, inputs), 3 * bank + 5),
        ("add_norm_fwd", _without_gradients, (fused, theirs and added, [c, delta, *sources]), bank + 4),
    ):
        mine, others = both(wrap, *pair)
        rows.append(make_row(f"attnres_n{bank}_{name}", shape, mine, traffic * unit, PEER if others else "", others))
    return rows


def overlapped(bank: int) -> list[Row]:
    """Forward and backward with the other form of the backward kernel."""
    inputs = [_normal(WIDTH, dtype=torch.float32) / 85, *(_normal(TOKENS, WIDTH) for _ in range(bank + 1))]
    chosen = triton_mix.OVERLAP
    try:
        triton_mix.OVERLAP = True
        call = _gradients(lambda c, *sources: mix(sources, c, EPS), inputs)
        shape, traffic = f"n={bank} T={TOKENS} D={WIDTH} bf16", (3 * bank + 5) * 2 * TOKENS * WIDTH
        return [make_row(f"attnres_n{bank}_fwdbwd_overlap", shape, [call], traffic)]
    finally:
        triton_mix.OVERLAP = chosen


def two_phases(bank: int) -> list[Row]:
    """A block's reads by two phases; the peer is as many single reads of ours."""
    unit, shape = 2 * TOKENS * WIDTH, f"n={bank} T={TOKENS} D={WIDTH} bf16, {SITES} reads"
    weights = _normal(SITES, WIDTH, dtype=torch.float32) / 85
    blocks, live = [_normal(TOKENS, WIDTH) for _ in range(bank)], _normal(TOKENS, WIDTH)

    def ours() -> None:
        with torch.no_grad(), force("triton"):
            partial = phase_one(blocks, weights, EPS)
            for site in range(SITES):
                merge(partial, site, live)

    def single() -> None:
        with torch.no_grad():
            for site in range(SITES):
                mix([*blocks, live], weights[site], EPS)

    traffic = (bank + 4 * SITES) * unit
    return [make_row(f"attnres_n{bank}_two_phase", shape, [ours], traffic, "single reads", [single])]


def elementwise() -> list[Row]:
    """Gated norm, gated unit and short convolution, forward and with gradients."""
    heads = TOKENS * 96
    cases = (
        ("gated_rms_norm", "T=8192 H=96 V=128", lambda o, g, w: gated_rms_norm(o, g, w, EPS),
         lambda: [_normal(heads, 128), _normal(heads, 128), _normal(128, dtype=torch.float32)], 256 * heads, 3, 5),
        ("situ_glu", "N=65536 F=3072", situ_glu, lambda: [_normal(65536, 3072), _normal(65536, 3072)], 2 * 65536 * 3072, 3, 5),
        ("short_conv", "B=1 T=8192 X=36864 W=4", lambda x, w: short_conv(x, w)[0],
         lambda: [_normal(1, TOKENS, 36864), _normal(36864, 4, dtype=torch.float32)], 2 * TOKENS * 36864, 2, 3),
    )  # fmt: skip
    rows = []
    for name, shape, function, make, unit, forward, backward in cases:
        inputs = make()
        rows.append(make_row(f"{name}_fwd", shape, [_without_gradients(function, inputs)], forward * unit))
        rows.append(make_row(f"{name}_fwdbwd", shape, [_gradients(function, inputs)], (forward + backward) * unit))
    return rows


def run(results: Path | None = None) -> list[Row]:
    """Measure all rows; print them and append them to `results`.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("these rows need a CUDA device; torch sees none")
    rows = []
    for part in (lambda: reads(8), lambda: reads(3), lambda: overlapped(8), lambda: two_phases(8), elementwise):
        for row in part():
            report(row, results)
            rows.append(row)
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
