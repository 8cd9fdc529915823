"""The kernels of few rows, emulated on the CPU, against float64; and what `select` says of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.attnres import read
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.few_rows.cuda.mixture import mixture
from perilune.ops.few_rows.cuda.project import project
from perilune.ops.few_rows.experts import combined, experts
from perilune.ops.linear import gated_linear, linear, linears, normed_linear
from perilune.ops.linear import select as select_linear
from perilune.ops.mla.append import append_latents
from perilune.ops.mla.append import select as select_append
from perilune.ops.moe import MixtureWeights, layer_decode, layer_obstacle, mlp_decode, moe_decode
from perilune.ops.moe.decode import select as select_moe
from perilune.ops.moe.router import route
from perilune.ops.norm import rms_norm_reference
from perilune.ops.situ_glu import situ_glu_reference

pytestmark = [
    pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing())),
    pytest.mark.usefixtures("poisoned_memory"),
]
CAPS = (4.0, 25.0)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def tokens_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(got: Tensor, truth: Tensor, limit: float = 4e-3) -> None:
    assert got.isfinite().all()
    error = float((got.double() - truth).norm() / truth.norm())
    assert error < limit, error


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("tokens", "width", "sizes"), [(1, 1024, (40, 2)), (9, 160, (16, 33, 8)), (20, 64, (50,))])
@torch.no_grad()
def test_projections(tokens: int, width: int, sizes: tuple[int, ...], backwards: bool) -> None:
    x, gate, scale = tokens_of(0, tokens, width), tokens_of(1, tokens, width), 1 + normal(2, width, dtype=torch.float32)
    weights = [normal(3 + i, size, width) for i, size in enumerate(sizes)]
    exact = x.double()
    with force("cuda"), emulated(backwards):
        assert select_linear(x, weights[0]).implementation == "cuda"
        plain = linears(x[:, None], *weights)
        for got, weight in zip(plain, weights, strict=True):
            assert got.shape == (tokens, 1, len(weight))
            close(got[:, 0], exact @ weight.double().T)
        close(normed_linear(x, scale, 1e-3, weights[0]), rms_norm_reference(exact, scale, 1e-3) @ weights[0].double().T)
        close(gated_linear(x, gate, weights[0]), (exact * gate.double().sigmoid()) @ weights[0].double().T)
        assert torch.equal(linear(x[-1:], weights[0]), plain[0][-1]), "depends on its company"
        other, matrix = tokens_of(4, tokens, 96), normal(5, sizes[0], 96)
        (got,) = project(x, weights[:1], second=(other, matrix))
        close(got, exact @ weights[0].double().T + other.double() @ matrix.double().T)


@torch.no_grad()
def test_rows_of_a_wider_tensor_and_a_column_that_is_not_a_number() -> None:
    wide, weight = tokens_of(0, 3, 200), normal(1, 24, 96)
    with force("cuda"), emulated():
        for begin in (8, 3):  # aligned, and not
            x = wide[:, begin : begin + 96]
            assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))
        x = wide[:, :96].clone()
        x[1, 5] = torch.nan
        got = linear(x, weight)
        assert got[1].isnan().all() and got[::2].isfinite().all()


def layer(experts_count: int, width: int, latent: int | None, hidden: int, shared: int) -> MixtureWeights:
    inner = latent or width
    stacks = (
        normal(1, experts_count, hidden, inner), normal(2, experts_count, hidden, inner), normal(3, experts_count, inner, hidden),
    )  # fmt: skip
    return MixtureWeights(
        normal(4, experts_count, width, dtype=torch.float32) * 3, normal(5, experts_count, dtype=torch.float32),
        None if latent is None else normal(6, latent, width), None if latent is None else normal(7, width, latent),
        None if latent is None else (1 + normal(8, latent, dtype=torch.float32), 1e-4), stacks,
        None if not shared else (normal(9, shared, width), normal(10, shared, width), normal(11, width, shared)),
    )  # fmt: skip


def truth_of(x: Tensor, w: MixtureWeights, k: int, caps: tuple[float, float] | None, scaling: float) -> Tensor:
    """The layer in float64, token by token."""
    unit = lambda a, b: situ_glu_reference(a, b, *caps) if caps else torch.nn.functional.silu(a) * b  # noqa: E731
    x = x.double()
    with force("torch"):
        routing = route(x @ w.router_ED.double().T, w.bias_E.double(), k, scaling_factor=scaling)
    z = x if w.down_LD is None else (x @ w.down_LD.double().T).bfloat16().double()
    w1, w3, w2 = (stack.double() for stack in w.experts)
    rows = []
    for token, chosen, weights in zip(z, routing.index_NA.tolist(), routing.weight_NA, strict=True):
        outs = [w2[e] @ unit(w1[e] @ token, w3[e] @ token) for e in chosen]
        rows.append(sum(p * y for p, y in zip(weights, outs, strict=True)))
    out = torch.stack(rows)
    if w.up_DL is not None:
        assert w.norm is not None
        out = rms_norm_reference(out, *w.norm) @ w.up_DL.double().T
    if w.shared is not None:
        gate, up, down = (matrix.double() for matrix in w.shared)
        out = out + unit(x @ gate.T, x @ up.T) @ down.T
    return out


CASES = [  # tokens, experts, active, width, latent, hidden, shared, activation
    (1, 20, 3, 96, 64, 32, 64, "situ"),
    (5, 8, 2, 64, None, 96, 32, "swiglu"),
    (19, 40, 4, 64, 32, 48 + 16, 0, "situ"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_layer_with_experts_in_both_orders(case: tuple) -> None:
    tokens, count, active, width, latent, hidden, shared, activation = case
    x, weights = tokens_of(0, tokens, width), layer(count, width, latent, hidden, shared)
    caps = CAPS if activation == "situ" else None
    truth = truth_of(x, weights, active, caps, 1.5)
    outs = []
    for backwards in (False, True):
        with force("cuda"), emulated(backwards):
            assert layer_obstacle(x, weights, active) is None
            outs.append(layer_decode(x, weights, active, activation, scaling_factor=1.5))
            alone = layer_decode(x[-1:], weights, active, activation, scaling_factor=1.5)
    close(outs[0], truth, 6e-3)
    assert torch.equal(*outs) and torch.equal(alone, outs[0][-1:]), "depends on its company"


@torch.no_grad()
def test_routes_with_ties_not_a_number_and_every_expert_of_a_token() -> None:
    count, active, width = 6, 3, 32
    w1, w3, w2 = normal(0, count, 32, width), normal(1, count, 32, width), normal(2, count, width, 32)
    z, bias = tokens_of(3, 3, width), torch.zeros(count)
    logits = torch.tensor([[0.0] * 6, [1.0, 5.0, 5.0, 5.0, 5.0, -1.0], [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]])
    bias[0] = -0.25
    with force("cuda"), emulated():
        got = combined(experts(logits, bias, z, w1, w3, w2, active, CAPS, True, 1.0))[0]
        chosen = [(1, 2, 3), (1, 2, 3), (5, 4, 3)]  # equal scores: the lower expert
        for row, picked in enumerate(chosen):
            scores = logits[row, list(picked)].double().sigmoid()
            outs = [
                w2[e].double() @ situ_glu_reference(w1[e].double() @ z[row].double(), w3[e].double() @ z[row].double())
                for e in picked
            ]
            close(got[row], sum(s * y for s, y in zip(scores / scores.sum(), outs, strict=True)), 6e-3)
        logits[1, 2] = torch.nan
        got = combined(experts(logits, bias, z, w1, w3, w2, active, CAPS, True, 1.0))[0]
        assert got[1].isnan().all() and got[::2].isfinite().all()


@torch.no_grad()
def test_logits_are_as_exact_as_float32() -> None:
    x, router = tokens_of(0, 4, 1024), normal(1, 20, 1024, dtype=torch.float32)
    with force("cuda"), emulated():
        _, logits, _ = mixture(x, None, router, None, CAPS)
    assert logits is not None
    close(logits, x.double() @ router.double().T, 5e-7)


@torch.no_grad()
def test_a_gated_mlp_and_experts_alone() -> None:
    x, w = tokens_of(0, 3, 64), layer(8, 64, None, 32, 96)
    assert w.shared is not None
    with force("cuda"), emulated():
        got = mlp_decode(x, *w.shared)
        routed = moe_decode(x.float() @ w.router_ED.T, w.bias_E, x, *w.experts, 2)
    gate, up, down = (matrix.double() for matrix in w.shared)
    assert got is not None
    close(got, situ_glu_reference(x.double() @ gate.T, x.double() @ up.T) @ down.T)
    close(routed, truth_of(x, w._replace(shared=None), 2, CAPS, 1.0), 6e-3)


def test_entries_of_a_latent_cache() -> None:
    pool = torch.full((4, 2, 3, 48), torch.nan).bfloat16()
    kv, scale = tokens_of(0, 2, 48), 1 + normal(1, 32, dtype=torch.float32)
    page, slot = torch.tensor([3, 1]), torch.tensor([0, 2])
    entries = pool[:, 1]
    with force("cuda"), emulated(), torch.no_grad():
        assert select_append(kv, entries).implementation == "cuda"
        append_latents(kv, scale, 1e-4, entries, page, slot)
    close(entries[page, slot, :32], rms_norm_reference(kv[:, :32].double(), scale, 1e-4))
    assert torch.equal(entries[page, slot, 32:], kv[:, 32:]) and int(pool.isfinite().sum()) == 2 * 48
    plain = torch.zeros(4, 3, 48, dtype=torch.bfloat16)
    append_latents(kv, scale, 1e-4, plain, page, slot)
    assert float((plain[page, slot] - entries[page, slot]).abs().max()) <= 0.02


@pytest.mark.parametrize(
    ("count", "width", "delta", "norm"), [(2, 1024, True, True), (7, 160, False, True), (3, 1032, True, False)]
)
@torch.no_grad()
def test_reads_over_depth(count: int, width: int, delta: bool, norm: bool) -> None:
    *bank, live = (tokens_of(i, 3, 1, width) for i in range(count))
    pending = tokens_of(20, 3, 1, width) if delta else None
    weight, query = normal(21, width, dtype=torch.float32), 1 + normal(22, width, dtype=torch.float32)
    scale = 1 + normal(23, width, dtype=torch.float32) if norm else None
    total = live if pending is None else (live.double() + pending.double()).bfloat16()
    truth = mix_reference([x.double() for x in (*bank, total)], (weight * query).double(), 1e-3)
    truth = truth if scale is None else rms_norm_reference(truth, scale, 1e-4)
    outs = []
    for backwards in (False, True):
        with force("cuda"), emulated(backwards):
            outs.append(read(bank, live, pending, weight, 1e-3, scale, 1e-4, query))
            last = [x[-1:] for x in (*bank, live)]
            alone = read(
                last[:-1], last[-1], None if pending is None else pending[-1:], weight, 1e-3, scale, 1e-4, query
            )
    close(outs[0][0], truth)
    assert torch.equal(outs[0][1], total) and torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(alone[0], outs[0][0][-1:]), "depends on its company"


def test_what_the_kernels_do_not_take_is_said() -> None:
    x, weight, stack = tokens_of(0, 33, 64), normal(1, 8, 64), normal(2, 4, 8, 64)
    with force("cuda"):
        assert "not on cpu" in select_linear(x[:4], weight).reason
        with emulated(), torch.no_grad():
            assert "not 33" in select_linear(x, weight).reason and "not 33" in select_moe(x, stack).reason
            assert "not float32" in select_linear(x[:4].float(), weight.float()).reason
            assert "not float32" in select_linear(x[:4], weight.float()).reason
            assert "multiples of 32" in select_linear(x[:4, :40], weight[:, :40].contiguous()).reason
            assert "dense" in select_linear(x[:4, :32], weight[:, :32]).reason
        with emulated():
            assert "gradient" in select_linear(x[:4], weight.requires_grad_()).reason
    assert select_linear(x[:4], weight).implementation == "torch"
