"""Rows of the routed experts, the router, its product and the balancer's histogram on a GPU.

The experts' peer is torch's own chain: rows sorted by expert, `torch._grouped_mm` for each product, SiTU-GLU as a kernel of
its own (ours, which is kinder to the peer than a dozen element-wise ones), `index_add` into the tokens in float32. It
keeps what autograd keeps; with `_recompute` it saves as little as ours does; in `_fp32_weights` both round master weights
to bf16 for the products, as training does. The router's peer is sigmoid, `torch.topk`
and gather, with the counts that the balancer needs; the histogram's is `torch.bincount`. The peer of latent-down and router is two products of
torch, the router's in float32.

K3's shape is that of one GPU of an expert-parallel group: 56 of the 896 experts, 512 rows each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from perilune.bench.graphs import Calls, GraphCase, sets
from perilune.ops.choice import force
from perilune.ops.moe import route, routed_experts
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.ops.moe.router_latent import project
from perilune.ops.situ_glu import situ_glu

K3 = (1792, 3584, 3072, 56, 16)  # N, L, F, E, A
MINI = (8192, 512, 512, 64, 8)
EXPERTS = {"k3": K3, "mini": MINI}
ROUTER = (8192, 896, 16)  # N, E, A
WIDTH, LATENT = 7168, 3584
PEER = "torch._grouped_mm, SiTU kernel, index_add"


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cases() -> Iterator[GraphCase]:
    """Routing and histogram at K3's size; the experts at the shapes of `EXPERTS`."""
    yield _routing()
    yield _histogram()
    yield from _products()
    for name in EXPERTS:
        yield from expert_cases(name)


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


def _rounded(z: Tensor, index: Tensor, weight: Tensor, *matrices: Tensor) -> Tensor:
    return grouped_mm_chain(z, index, weight, *(w.to(z.dtype) for w in matrices))


def forward(function: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return function(*args)

    return run


def both(function: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A call forward and backward, for a fixed cotangent."""
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


def expert_cases(name: str) -> Iterator[GraphCase]:
    """Forward, and forward with backward, at one shape; the recomputation of gate and up is not in a row's operations."""
    tokens, width, hidden, count, active = EXPERTS[name]
    shape = f"N={tokens} L={width} F={hidden} E={count} A={active} bf16, {tokens * active // count} rows an expert"
    product = 2.0 * tokens * active * width * hidden
    weights = 2.0 * 3 * count * width * hidden
    for kind, wrap, theirs, products, passes in (
        ("fwd", forward, grouped_mm_chain, 3, 1),
        ("fwdbwd", both, grouped_mm_chain, 9, 3),
        ("fwdbwd_recompute", both, _recomputed, 9, 3),
        ("fwdbwd_fp32_weights", both, _rounded, 9, 10),  # what a copy in bf16 and gradients in fp32 add
    ):

        def calls(wrap: Callable = wrap, theirs: Callable = theirs) -> tuple[Calls, Calls]:
            args = expert_operands(*EXPERTS[name])
            if theirs is _rounded:
                args[3:] = [w.float() for w in args[3:]]
            return [wrap(routed_experts, args)], [wrap(theirs, args)]

        yield GraphCase(
            name=f"moe_experts_{kind}_{name}", shape=shape, make=calls, flops=products * product, bytes=passes * weights,
            peer=PEER + (", under activation checkpointing" if theirs is _recomputed else ""),
        )  # fmt: skip


def _router_case(name: str, make: Callable[[Tensor], tuple[Calls, Calls]], passes: int, peer: str) -> GraphCase:
    """`make` gives the calls for one set of logits."""
    tokens, count, active = ROUTER
    size = 4.0 * tokens * count

    def calls() -> tuple[Calls, Calls]:
        pairs = [make(_normal(tokens, count, dtype=torch.float32)) for _ in range(sets(size))]
        return [call for ours, _ in pairs for call in ours], [call for _, theirs in pairs for call in theirs]

    return GraphCase(
        name=name, shape=f"N={tokens} E={count} A={active} fp32", make=calls, bytes=passes * size, peer=peer,
        peer_waits=peer == "torch.bincount", dtype=torch.float32,
    )  # fmt: skip


def _routing() -> GraphCase:
    tokens, count, active = ROUTER

    def calls(logits: Tensor) -> tuple[Calls, Calls]:
        bias = _normal(count, dtype=torch.float32) / 10
        ones = torch.ones(tokens * active, dtype=torch.int64, device="cuda")

        def theirs() -> object:
            scores = torch.sigmoid(logits)
            index = torch.topk(scores + bias, active + 1).indices[:, :active]
            weight = scores.gather(-1, index)
            counts = torch.zeros(count, dtype=torch.int64, device="cuda").index_add_(0, index.flatten(), ones)
            return weight / weight.sum(-1, keepdim=True), counts

        return [lambda: route(logits, bias, active)], [theirs]

    return _router_case("moe_router", calls, 2, "sigmoid, torch.topk, gather, counts")


def _histogram() -> GraphCase:
    _, count, active = ROUTER

    def calls(logits: Tensor) -> tuple[Calls, Calls]:
        bias = _normal(count, dtype=torch.float32) / 10
        routing = route(logits, bias, active)
        ours, plain = QuantileHistogram(count, active), QuantileHistogram(count, active)
        seen = routing.scores_NE, routing.cutoff_N, None, routing.counts(), bias

        def theirs() -> None:
            with force("torch"):
                plain.observe(*seen)

        return [lambda: ours.observe(*seen)], [theirs]

    return _router_case("moe_histogram", calls, 1, "torch.bincount")


def _products() -> Iterator[GraphCase]:
    """Latent-down and router from master weights in float32."""
    tokens, count, _ = ROUTER

    def calls(backward: bool) -> tuple[Calls, Calls]:
        x = _normal(tokens, WIDTH)
        leaves = [x, *(_normal(size, WIDTH, dtype=torch.float32) * WIDTH**-0.5 for size in (LATENT, count))]
        leaves = [leaf.requires_grad_(backward) for leaf in leaves]
        cotangents = [_normal(tokens, LATENT), _normal(tokens, count, dtype=torch.float32)]

        def ours() -> object:
            outputs = project(*leaves)
            return torch.autograd.grad(outputs, leaves, cotangents) if backward else outputs

        def theirs() -> object:
            with force("torch"):
                outputs = project(*leaves)
            return torch.autograd.grad(outputs, leaves, cotangents) if backward else outputs

        return [ours], [theirs]

    product = 2.0 * tokens * WIDTH * (LATENT + count)
    for kind, backward, products in (("fwd", False, 1), ("fwdbwd", True, 3)):

        def make(backward: bool = backward) -> tuple[Calls, Calls]:
            return calls(backward)

        yield GraphCase(
            name=f"moe_latent_router_{kind}", shape=f"N={tokens} D={WIDTH} L={LATENT} E={count}, logits in fp32",
            make=make, flops=products * product, peer="two products of torch, the router's in float32",
        )  # fmt: skip
