"""The kernels of few rows, emulated on the CPU, against float64; and what `select` says of them.

The emulator compiles a kernel for each set of sizes, so cases share their sizes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.attnres import read
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.few_rows.cuda import project
from perilune.ops.few_rows.cuda.mixture import mixture
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


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def tokens_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(got: Tensor, truth: Tensor, limit: float = 4e-3) -> None:
    assert got.isfinite().all()
    error = float((got.double() - truth).norm() / truth.norm())
    assert error < limit, error


WIDTH = 1056  # more steps than a warp has under way, and warps with fewer than others


@torch.no_grad()
def test_projections() -> None:
    x, gate, scale = tokens_of(0, 9, WIDTH), tokens_of(1, 9, WIDTH), 1 + normal(2, WIDTH, dtype=torch.float32)
    weights, exact = [normal(3 + i, size, WIDTH) for i, size in enumerate((16, 33, 8))], x.double()
    outs = []
    for backwards in (False, True):
        with force("cuda"), emulated(backwards):
            assert select_linear(x, weights[0]).implementation == "cuda"
            outs.append(linears(x[:, None], *weights))
    with force("cuda"), emulated():
        normed, gated = normed_linear(x, scale, 1e-3, weights[1]), gated_linear(x, gate, weights[1])
        alone = linear(x[-1:], weights[1])
    for got, other, weight in zip(*outs, weights, strict=True):
        assert got.shape == (9, 1, len(weight)) and torch.equal(got, other)
        close(got[:, 0], exact @ weight.double().T)
    close(normed, rms_norm_reference(exact, scale, 1e-3) @ weights[1].double().T)
    close(gated, (exact * gate.double().sigmoid()) @ weights[1].double().T)
    assert torch.equal(alone[0], outs[0][1][-1, 0]), "depends on its company"


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokens", "limit", "tiles"), [(3, "MANY_TILES", 4), (25, "MANY_TILES", 8), (25, "SOME_TILES", 4)]
)
def test_blocks_of_many_rows(tokens: int, limit: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four and eight tiles of rows, which large matrices get."""
    x, gate, scale = tokens_of(0, 25, 96), tokens_of(1, 25, 96), 1 + normal(2, 96, dtype=torch.float32)
    weights = [normal(3 + i, size, 96) for i, size in enumerate((135, 20))]
    with force("cuda"), emulated():
        few = linears(x[:tokens], *weights)
        monkeypatch.setattr(project, limit, 4)
        assert project.row_tiles(11, project.token_tiles(tokens)) == tiles
        got = linears(x[:tokens], *weights)
        normed = normed_linear(x[:tokens], scale, 1e-3, weights[0])
        gated = gated_linear(x[:tokens], gate[:tokens], weights[0])
    exact = x[:tokens].double()
    for y, other, weight in zip(got, few, weights, strict=True):
        assert torch.equal(y, other), "the number of a block's rows shows"
        close(y, exact @ weight.double().T)
    close(normed, rms_norm_reference(exact, scale, 1e-3) @ weights[0].double().T)
    close(gated, (exact * gate[:tokens].double().sigmoid()) @ weights[0].double().T)


@torch.no_grad()
def test_rows_of_a_wider_tensor_and_a_number_that_is_none() -> None:
    wide, weight = tokens_of(0, 3, WIDTH + 40), normal(1, 24, WIDTH)
    with force("cuda"), emulated():
        for begin in (8, 3):  # aligned, and not
            x = wide[:, begin : begin + WIDTH]
            assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))
        x = wide[:, :WIDTH].clone()
        x[1, 5] = torch.nan
        got = linear(x, weight)
    assert got[1].isnan().all() and got[::2].isfinite().all()


@torch.no_grad()
def test_what_a_wide_layer_makes_of_its_tokens_first() -> None:
    """Blocks for latents, logits and hidden values of one launch want different amounts of shared memory."""
    x, down, router = tokens_of(0, 2, WIDTH), normal(1, 16, WIDTH), normal(2, 9, WIDTH, dtype=torch.float32)
    unit, exact = (normal(3, 16, WIDTH), normal(4, 16, WIDTH)), x.double()
    with force("cuda"), emulated():
        z, logits, hidden = mixture(x, down, router, unit, (4.0, 25.0))
    assert z is not None and logits is not None and hidden is not None
    close(z, exact @ down.double().T)
    close(logits, exact @ router.double().T, 1e-6)
    close(hidden, situ_glu_reference(exact @ unit[0].double().T, exact @ unit[1].double().T))


EXPERTS, ACTIVE, D, LATENT, HIDDEN = 40, 4, 64, 32, 64


def layer() -> MixtureWeights:
    return MixtureWeights(
        normal(4, EXPERTS, D, dtype=torch.float32) * 3, normal(5, EXPERTS, dtype=torch.float32), normal(6, LATENT, D),
        normal(7, D, LATENT), (1 + normal(8, LATENT, dtype=torch.float32), 1e-4),
        (normal(1, EXPERTS, HIDDEN, LATENT), normal(2, EXPERTS, HIDDEN, LATENT), normal(3, EXPERTS, LATENT, HIDDEN)),
        (normal(9, 96, D), normal(10, 96, D), normal(11, D, 96)),
    )  # fmt: skip


def experts_of(z: Tensor, w: MixtureWeights, chosen: list[int], weights: Tensor) -> Tensor:
    """A token's experts in float64."""
    w1, w3, w2 = (stack.double() for stack in w.experts)
    outs = torch.stack([w2[e] @ situ_glu_reference(w1[e] @ z, w3[e] @ z) for e in chosen])
    return weights @ outs


@torch.no_grad()
def test_a_layer_with_experts() -> None:
    """Of 19 tokens; alone each block finds the routes and adds up the experts by itself."""
    x, w = tokens_of(0, 19, D), layer()
    outs = []
    for backwards in (False, True):
        with force("cuda"), emulated(backwards):
            assert layer_obstacle(x, w, ACTIVE) is None
            outs.append(layer_decode(x, w, ACTIVE, scaling_factor=1.5))
            alone = layer_decode(x[-1:], w, ACTIVE, scaling_factor=1.5)
    exact = x.double()
    with force("torch"):
        routing = route(exact @ w.router_ED.double().T, w.bias_E.double(), ACTIVE, scaling_factor=1.5)
    assert w.down_LD is not None and w.up_DL is not None and w.norm is not None and w.shared is not None
    z = (exact @ w.down_LD.double().T).bfloat16().double()
    rows = [experts_of(*row) for row in zip(z, [w] * 19, routing.index_NA.tolist(), routing.weight_NA, strict=True)]
    gate, up, down = (matrix.double() for matrix in w.shared)
    truth = rms_norm_reference(torch.stack(rows), *w.norm) @ w.up_DL.double().T
    truth = truth + situ_glu_reference(exact @ gate.T, exact @ up.T) @ down.T
    close(outs[0], truth, 6e-3)
    assert torch.equal(*outs) and torch.equal(alone, outs[0][-1:]), "depends on its company"


@torch.no_grad()
def test_routes_of_equal_scores_and_of_a_score_that_is_none() -> None:
    w, z, bias = layer(), tokens_of(3, 1, LATENT), torch.zeros(EXPERTS)
    logits = torch.full((1, EXPERTS), -4.0)
    logits[0, [5, 33, 34, 39, 7]] = 2.0
    bias[7] = -0.25  # only steers
    with force("cuda"), emulated():
        for lifted, chosen in ((None, [5, 33, 34, 39]), (38, [38, 5, 33, 34])):  # of equal scores the lower expert
            if lifted is not None:
                logits[0, lifted] = 3.0
            scores = logits[0, chosen].double().sigmoid()
            got = moe_decode(logits, bias, z, *w.experts, ACTIVE)
            close(got[0], experts_of(z[0].double(), w, chosen, scores / scores.sum()), 6e-3)
        logits[0, 2] = torch.nan
        assert moe_decode(logits, bias, z, *w.experts, ACTIVE).isnan().all()


@pytest.mark.parametrize("activation", ["situ", "swiglu"])
@torch.no_grad()
def test_a_gated_mlp(activation: str) -> None:
    x, shared = tokens_of(0, 3, D), layer().shared
    assert shared is not None
    with force("cuda"), emulated():
        got = mlp_decode(x, *shared, activation)
    gate, up, down = (matrix.double() for matrix in shared)
    caps = (4.0, 25.0) if activation == "situ" else (None, None)
    assert got is not None
    close(got, situ_glu_reference(x.double() @ gate.T, x.double() @ up.T, *caps) @ down.T)


@torch.no_grad()
def test_reads_over_depth() -> None:
    """Rows of which a thread owns two runs of numbers, or none."""
    *bank, live = (tokens_of(i, 3, 1, 1096) for i in range(4))
    pending, scale = tokens_of(20, 3, 1, 1096), 1 + normal(23, 1096, dtype=torch.float32)
    weight, query = normal(21, 1096, dtype=torch.float32), 1 + normal(22, 1096, dtype=torch.float32)
    total = (live.double() + pending.double()).bfloat16()
    truth = mix_reference([x.double() for x in (*bank, total)], (weight * query).double(), 1e-3)
    outs = []
    for backwards in (False, True):
        with force("cuda"), emulated(backwards):
            outs.append(read(bank, live, pending, weight, 1e-3, scale, 1e-4, query))
    with force("cuda"), emulated():
        alone = read([x[-1:] for x in bank], live[-1:], pending[-1:], weight, 1e-3, scale, 1e-4, query)
    close(outs[0][0], rms_norm_reference(truth, scale, 1e-4))
    assert torch.equal(outs[0][1], total) and torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(alone[0], outs[0][0][-1:]), "depends on its company"


@torch.no_grad()
def test_entries_of_a_latent_cache() -> None:
    pool = torch.full((4, 2, 3, 48), torch.nan).bfloat16()
    kv, scale = tokens_of(0, 2, 48), 1 + normal(1, 32, dtype=torch.float32)
    page, slot, entries = torch.tensor([3, 1]), torch.tensor([0, 2]), pool[:, 1]
    with force("cuda"), emulated():
        assert select_append(kv, entries).implementation == "cuda"
        append_latents(kv, scale, 1e-4, entries, page, slot)
    close(entries[page, slot, :32], rms_norm_reference(kv[:, :32].double(), scale, 1e-4))
    assert torch.equal(entries[page, slot, 32:], kv[:, 32:]) and int(pool.isfinite().sum()) == 2 * 48
    plain = torch.zeros(4, 3, 48, dtype=torch.bfloat16)
    append_latents(kv, scale, 1e-4, plain, page, slot)
    assert float((plain[page, slot] - entries[page, slot]).abs().max()) <= 0.02


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
