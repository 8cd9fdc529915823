"""Rows of reads over depth and of the element-wise kernels on a GPU, at K3's sizes.

The peer of a read, where fla-core can be imported, is its `fused_attnres`; that of a read with the running-sum add and the
output norm is the add and the same function with its own output norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from perilune.bench.graphs import Calls, GraphCase
from perilune.ops.attnres import merge, mix, phase_one, read
from perilune.ops.norm import gated_rms_norm
from perilune.ops.short_conv import short_conv
from perilune.ops.situ_glu import situ_glu

TOKENS, WIDTH, EPS = 8192, 7168, 1e-5
SITES = 24  # reads that share the finished blocks: 12 layers of two
PEER = "fla-core"


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _tensors(count: int) -> list[Tensor]:
    return [_normal(TOKENS, WIDTH) for _ in range(count)]


def _score_weight() -> Tensor:
    return _normal(WIDTH, dtype=torch.float32) / 85


def _gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of `function` for a fixed cotangent."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    cotangent = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, cotangent)


def _all_gradients(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """The same of a function with several results, for one cotangent of all."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    cotangent = _normal(TOKENS, WIDTH)

    def run() -> tuple[Tensor, ...]:
        results = function(*inputs)
        return torch.autograd.grad(results, inputs, [cotangent] * len(results))

    return run


def _without_gradients(function: Callable[..., object], inputs: list[Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(*inputs)

    return run


def _peer_mix(norm_weight: Tensor | None = None) -> Callable[..., Tensor] | None:
    with suppress(ImportError):
        from fla.ops.attnres import fused_attnres

        ones = torch.ones(WIDTH, device="cuda")
        return lambda c, *sources: fused_attnres(c, list(sources), ones, norm_weight, rms_eps=EPS)
    return None


def cases() -> Iterator[GraphCase]:
    """All rows."""
    yield from _reads(8)
    yield from _reads(3)
    yield from _blocks(8)
    yield from _elementwise()


def _reads(bank: int) -> Iterator[GraphCase]:
    """Single reads of a bank and a running sum."""
    unit, shape = 2 * TOKENS * WIDTH, f"n={bank} T={TOKENS} D={WIDTH} bf16"

    def ours(c: Tensor, *sources: Tensor) -> Tensor:
        return mix(sources, c, EPS)

    def make(wrap: Callable) -> Callable[[], tuple[Calls, Calls]]:
        def calls() -> tuple[Calls, Calls]:
            inputs, theirs = [_score_weight(), *_tensors(bank + 1)], _peer_mix()
            return [wrap(ours, inputs)], [] if theirs is None else [wrap(theirs, inputs)]

        return calls

    def fused() -> tuple[Calls, Calls]:
        norm_weight = _normal(WIDTH, dtype=torch.float32)
        inputs, normed = [_score_weight(), *_tensors(bank + 2)], _peer_mix(norm_weight)

        def mine(c: Tensor, delta: Tensor, *sources: Tensor) -> Tensor:
            return read(sources[:-1], sources[-1], delta, c, EPS, norm_weight, EPS)[0]

        def added(c: Tensor, delta: Tensor, *sources: Tensor) -> Tensor:
            assert normed is not None, "only called where the peer was found"
            return normed(c, *sources[:-1], sources[-1] + delta)

        return [_without_gradients(mine, inputs)], [] if normed is None else [_without_gradients(added, inputs)]

    for name, calls, traffic in (
        ("fwd", make(_without_gradients), bank + 2),
        ("fwdbwd", make(_gradients), 3 * bank + 5),
        ("add_norm_fwd", fused, bank + 4),
    ):
        yield GraphCase(name=f"attnres_n{bank}_{name}", shape=shape, make=calls, peer=PEER, bytes=traffic * unit)


def _blocks(bank: int) -> Iterator[GraphCase]:
    """All reads of a block of layers: ours share one pass over the bank, the peer's read it each."""
    unit = 2 * TOKENS * WIDTH

    def ours(weights: Tensor, live: Tensor, *blocks: Tensor) -> list[Tensor]:
        partial = phase_one(blocks, weights, EPS)
        return [merge(partial, site, live) for site in range(SITES)]

    def calls(wrap: Callable) -> Callable[[], tuple[Calls, Calls]]:
        def make() -> tuple[Calls, Calls]:
            inputs = [_normal(SITES, WIDTH, dtype=torch.float32) / 85, *_tensors(bank + 1)]
            single = _peer_mix()

            def theirs(weights: Tensor, live: Tensor, *blocks: Tensor) -> list[Tensor]:
                assert single is not None, "only called where the peer was found"
                return [single(weight, *blocks, live) for weight in weights]

            return [wrap(ours, inputs)], [] if single is None else [wrap(theirs, inputs)]

        return make

    for name, wrap, traffic in (
        ("fwd", _without_gradients, bank + 4 * SITES),
        ("fwdbwd", _all_gradients, 3 * bank + 10 * SITES),
    ):
        yield GraphCase(
            name=f"attnres_n{bank}_block_{name}", shape=f"n={bank} T={TOKENS} D={WIDTH} bf16, {SITES} reads",
            make=calls(wrap), peer=f"{PEER}, single reads", bytes=traffic * unit,
        )  # fmt: skip


def _elementwise() -> Iterator[GraphCase]:
    """Gated norm, gated unit and short convolution, forward and with gradients."""
    heads = TOKENS * 96
    for name, shape, function, inputs, unit, forward, backward in (
        ("gated_rms_norm", "T=8192 H=96 V=128", lambda o, g, w: gated_rms_norm(o, g, w, EPS),
         lambda: [_normal(heads, 128), _normal(heads, 128), _normal(128, dtype=torch.float32)], 256 * heads, 3, 5),
        ("situ_glu", "N=65536 F=3072", situ_glu, lambda: [_normal(65536, 3072), _normal(65536, 3072)], 2 * 65536 * 3072, 3, 5),
        ("short_conv", "B=1 T=8192 X=36864 W=4", lambda x, w: short_conv(x, w)[0],
         lambda: [_normal(1, TOKENS, 36864), _normal(36864, 4, dtype=torch.float32)], 2 * TOKENS * 36864, 2, 3),
    ):  # fmt: skip
        for kind, wrap, passes in (("fwd", _without_gradients, forward), ("fwdbwd", _gradients, forward + backward)):

            def calls(
                wrap: Callable = wrap, function: Callable = function, inputs: Callable = inputs
            ) -> tuple[Calls, Calls]:
                return [wrap(function, inputs())], []

            yield GraphCase(name=f"{name}_{kind}", shape=shape, make=calls, bytes=passes * unit)
