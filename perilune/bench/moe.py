"""Bench cases of mixture of experts, latent attention and Newton-Schulz: CPU, float32.

Peers are what one writes in plain torch: a loop over experts under autograd, `torch.bincount` on bin numbers,
`scaled_dot_product_attention`, and torch's own Muon iteration matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import _muon

from perilune.bench.harness import Case
from perilune.ops.choice import force
from perilune.ops.mla import attend, attend_latent
from perilune.ops.moe import moe_decode, route, routed_experts
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.ops.native.blas import multiplies_bf16
from perilune.ops.newton_schulz import COEFFICIENTS, newton_schulz

EXPERT_SHAPES = ((4096, 64, 64, 16, 4), (2048, 256, 320, 32, 4), (2048, 256, 256, 64, 8))  # N, L, F, E, A
DECODE_SHAPES = ((1, 64, 64, 16, 4), (1, 256, 128, 32, 4), (8, 256, 128, 32, 4))
ATTENTION_SHAPES = ((8, 512, 4, 48, 32), (1, 4096, 4, 48, 32))  # B, T, H, K, V
LATENT_SHAPES = ((1, 256, 4, 32, 16, 32, 64), (1, 4096, 8, 64, 32, 64, 128))  # B, S, H, n, r, v, L
MATRIX_SHAPES = ((48, 64, 64), (96, 256, 320))

Timed = tuple[Callable[[], Any], Callable[[], Any]]


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _expert_weights(width: int, hidden: int, experts: int) -> list[Tensor]:
    shapes = ((experts, hidden, width), (experts, hidden, width), (experts, width, hidden))
    return [_randn(*shape, seed=i) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)]


def loop_over_experts(z: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The routed experts as a plain loop that autograd differentiates."""
    out = torch.zeros_like(z)
    for e in range(w1.shape[0]):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = z[token] @ w1[e].T, z[token] @ w3[e].T
        hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        out = out.index_add(0, token, (hidden @ w2[e].T) * weight[token, slot, None])
    return out


def _without_gradients(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return function(*args)

    return run


def _with_gradients(function: Callable[..., Tensor], *args: Any) -> Callable[[], Any]:
    with torch.no_grad():
        cotangent = torch.randn_like(function(*args))
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return lambda: torch.autograd.grad(function(*args), wanted, cotangent)


def expert_cases(device: str) -> Iterator[Case]:
    """Routed experts, forward and with gradients, against the loop over experts."""
    if device != "cpu":
        return
    for tokens, width, hidden, experts, active in EXPERT_SHAPES:
        for kind, timed, products in (("fwd", _without_gradients, 3), ("fwdbwd", _with_gradients, 9)):

            def make(sizes: tuple[int, ...] = (tokens, width, hidden, experts, active), timed: Any = timed) -> Timed:
                tokens, width, hidden, experts, active = sizes
                routing = route(_randn(tokens, experts), torch.zeros(experts), active)
                z, weight = _randn(tokens, width).requires_grad_(), routing.weight_NA.requires_grad_()
                weights = [w.requires_grad_() for w in _expert_weights(width, hidden, experts)]
                args = (z, routing.index_NA, weight, *weights)
                return timed(routed_experts, *args), timed(loop_over_experts, *args)

            yield Case(
                name=f"experts_{kind}_N{tokens}_L{width}_F{hidden}_E{experts}_A{active}",
                shape=f"N={tokens} L={width} F={hidden} E={experts} A={active} float32",
                make=make,
                peer="loop over experts in plain torch",
                flops=products * 2.0 * tokens * active * width * hidden,
            )


def decode_cases(device: str) -> Iterator[Case]:
    """Router and experts of one decode step, against top-k and a loop over the chosen experts."""
    if device != "cpu":
        return
    for tokens, width, hidden, experts, active in DECODE_SHAPES:

        def make(sizes: tuple[int, ...] = (tokens, width, hidden, experts, active)) -> Timed:
            tokens, width, hidden, experts, active = sizes
            logits, bias, z = _randn(tokens, experts), torch.zeros(experts), _randn(tokens, width)
            weights = _expert_weights(width, hidden, experts)

            def peer() -> Tensor:
                scores = torch.sigmoid(logits)
                index = torch.topk(scores + bias, active).indices
                weight = scores.gather(-1, index)
                return loop_over_experts(z, index, weight / weight.sum(-1, keepdim=True), *weights)

            return _without_gradients(moe_decode, logits, bias, z, *weights, active), _without_gradients(peer)

        yield Case(
            name=f"moe_decode_N{tokens}_L{width}_F{hidden}_E{experts}_A{active}",
            shape=f"N={tokens} L={width} F={hidden} E={experts} A={active} float32",
            make=make,
            peer="top-k and a loop over experts in plain torch",
            bytes=4 * 3 * min(tokens * active, experts) * width * hidden,
        )


def router_cases(device: str) -> Iterator[Case]:
    """Routing, and the histogram of quantile balancing, against torch.topk and torch.bincount."""
    if device != "cpu":
        return
    for tokens, experts, active in ((4096, 16, 4), (4096, 64, 8), (2048, 896, 16)):
        shape = f"N={tokens} E={experts} A={active} float32"

        def routing(tokens: int = tokens, experts: int = experts, active: int = active) -> Timed:
            logits, bias = _randn(tokens, experts), _randn(experts, seed=1) * 0.1

            def peer() -> Tensor:
                scores = torch.sigmoid(logits)
                top = torch.topk(scores + bias, active + 1)
                weight = scores.gather(-1, top.indices[:, :active])
                return weight / weight.sum(-1, keepdim=True)

            return _without_gradients(route, logits, bias, active), _without_gradients(peer)

        def histogram(tokens: int = tokens, experts: int = experts, active: int = active) -> Timed:
            bias = torch.zeros(experts)
            routed = route(_randn(tokens, experts), bias, active)
            counts, ours, plain = (
                torch.zeros(experts, dtype=torch.int64), QuantileHistogram(experts, active), QuantileHistogram(experts, active)
            )  # fmt: skip
            args = (routed.scores_NE, routed.cutoff_N, None, counts, bias)

            def peer() -> None:
                with force("torch"):
                    plain.observe(*args)

            return lambda: ours.observe(*args), peer

        name = f"N{tokens}_E{experts}_A{active}"
        scores = 4 * tokens * experts
        yield Case(
            name=f"route_{name}", shape=shape, make=routing, peer="sigmoid, torch.topk, gather", bytes=2 * scores
        )
        yield Case(name=f"histogram_{name}", shape=shape, make=histogram, peer="torch.bincount", bytes=scores)


def attention_cases(device: str) -> Iterator[Case]:
    """Causal attention with K != V, against torch's own on values padded to the keys' width."""
    if device != "cpu":
        return
    for batch, length, heads, key, value in ATTENTION_SHAPES:
        for kind, timed, products in (("fwd", _without_gradients, 1.0), ("fwdbwd", _with_gradients, 3.5)):

            def make(sizes: tuple[int, ...] = (batch, length, heads, key, value), timed: Any = timed) -> Timed:
                batch, length, heads, key, value = sizes
                q, k, v = (
                    _randn(batch, length, heads, d, seed=i).requires_grad_() for i, d in enumerate((key, key, value))
                )

                def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    heads_first = (x.transpose(1, 2) for x in (q, k, F.pad(v, (0, key - value))))
                    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.1)
                    return out.transpose(1, 2)[..., :value]

                return timed(attend, q, k, v, 0.1), timed(peer, q, k, v)

            yield Case(
                name=f"mla_{kind}_B{batch}_T{length}_H{heads}_K{key}_V{value}",
                shape=f"B={batch} T={length} H={heads} K={key} V={value} float32",
                make=make,
                peer="scaled_dot_product_attention",
                flops=products * batch * heads * length * length * (key + value),
            )


def latent_cases(device: str) -> Iterator[Case]:
    """One decode step against cached latents, against the absorbed form in plain torch."""
    if device != "cpu":
        return
    for batch, cached, heads, nope, shared, value, latent in LATENT_SHAPES:

        def make(sizes: tuple[int, ...] = (batch, cached, heads, nope, shared, value, latent)) -> Timed:
            batch, cached, heads, nope, shared, value, latent = sizes
            entries = _randn(batch, cached, latent + shared).split((latent, shared), -1)
            up = _randn(heads, nope + value, latent).split((nope, value), 1)
            args = (_randn(batch, 1, heads, nope), _randn(batch, 1, heads, shared), *entries, *up, 0.1, cached - 1)

            def peer() -> Tensor:
                with force("torch"):
                    return attend_latent(*args)

            return _without_gradients(attend_latent, *args), _without_gradients(peer)

        yield Case(
            name=f"mla_decode_B{batch}_S{cached}_H{heads}_L{latent}",
            shape=f"B={batch} S={cached} H={heads} n={nope} r={shared} v={value} L={latent} float32",
            make=make,
            peer="absorbed form in plain torch",
            bytes=4 * (batch * cached * (latent + shared) + heads * (nope + value) * latent),
        )


def newton_schulz_cases(device: str) -> Iterator[Case]:
    """Five iterations on a stack of matrices, against torch's on one matrix at a time.

    torch.optim.Muon iterates in bf16. Where the CPU cannot multiply bf16 that would be a contest against an emulation, so
    the peer is then the plain fp32 iteration.
    """
    if device != "cpu":
        return

    def fp32(matrix: Tensor) -> Tensor:
        with force("torch"):
            return newton_schulz(matrix)

    def muon(matrix: Tensor) -> Tensor:
        return _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)

    one, word = (
        (muon, "torch.optim.Muon's iteration, bf16") if multiplies_bf16() else (fp32, "plain torch iteration, fp32")
    )
    for count, rows, columns in MATRIX_SHAPES:

        def make(sizes: tuple[int, ...] = (count, rows, columns)) -> Timed:
            x = _randn(*sizes)
            return lambda: newton_schulz(x), lambda: [one(matrix) for matrix in x]

        side, other = min(rows, columns), max(rows, columns)
        yield Case(
            name=f"newton_schulz_{count}x{rows}x{columns}",
            shape=f"{count} matrices {rows}x{columns} float32",
            make=make,
            peer=f"{word}, one matrix at a time",
            flops=count * 5 * (4.0 * side * side * other + 2.0 * side**3),
        )


OPS: dict[str, Callable[[str], Iterator[Case]]] = {
    "experts": expert_cases,
    "moe_decode": decode_cases,
    "router": router_cases,
    "mla": attention_cases,
    "mla_decode": latent_cases,
    "newton_schulz": newton_schulz_cases,
}
