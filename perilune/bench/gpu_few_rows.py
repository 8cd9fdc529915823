"""Rows of products of a few tokens on a GPU, as a decode step makes them: projections, and whole layers with experts.

The bound is the traffic of the matrices at copy speed, for a layer those of the experts that the tokens chose. The peer of the
projections is torch's product (cuBLAS), one call a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.bench.graphs import Calls, GraphCase, sets
from perilune.config import ModelConfig
from perilune.config.presets import k3, mini
from perilune.ops.few_rows.cuda.project import project
from perilune.ops.moe import MixtureWeights, layer_decode

BATCHES = (1, 8, 32)
SOME_EXPERTS = 128  # of K3's 896, as many as fit a GPU twice


def _matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda").normal_(0.0, shape[-1] ** -0.5)


def _into_kda(cfg: ModelConfig) -> tuple[int, list[int]]:
    """Width and rows of the matrices that a KDA layer multiplies its input by."""
    kda = cfg.kda
    assert kda is not None, "a preset with KDA layers"
    return cfg.hidden_size, [kda.conv_width, kda.rank, kda.num_heads, kda.value_width]


def projections(cfg: ModelConfig) -> dict[str, tuple[int, list[int]]]:
    """Of a model: width and rows of each product of a few tokens."""
    width, into = _into_kda(cfg)
    return {"kda_in": (width, into), "kda_out": (into[-1], [width]), "head": (width, [min(cfg.vocab_size, 65536)])}


def _project(batch: int, width: int, sizes: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
    weights, x = [_matrix(size, width) for size in sizes], _matrix(batch, width)
    return lambda: project(x, weights), lambda: [F.linear(x, weight) for weight in weights]


def _layer(batch: int, cfg: ModelConfig) -> Callable[[], object]:
    moe, width = cfg.moe, cfg.hidden_size
    assert moe is not None and moe.latent_size is not None, "a preset with experts in a latent space"
    count, latent, hidden = min(moe.num_experts, SOME_EXPERTS), moe.latent_size, moe.expert_size
    shared = moe.num_shared_experts * hidden
    stacks = _matrix(count, hidden, latent), _matrix(count, hidden, latent), _matrix(count, latent, hidden)
    weights = MixtureWeights(
        _matrix(count, width, dtype=torch.float32), torch.zeros(count, device="cuda"), _matrix(latent, width),
        _matrix(width, latent), (torch.ones(latent, device="cuda"), 1e-5), stacks,
        (_matrix(shared, width), _matrix(shared, width), _matrix(width, shared)),
    )  # fmt: skip
    x = torch.randn(batch, width, device="cuda").bfloat16()
    return lambda: layer_decode(x, weights, moe.experts_per_token)


def layer_bytes(batch: int, cfg: ModelConfig) -> float:
    """Weights that a layer with experts reads: each dense one once, each expert that some token chose."""
    moe, width = cfg.moe, cfg.hidden_size
    assert moe is not None and moe.latent_size is not None, "a preset with experts in a latent space"
    count = min(moe.num_experts, SOME_EXPERTS)
    chosen = count * (1 - (1 - moe.experts_per_token / count) ** batch)
    matrices = 2 * moe.latent_size * width + 3 * moe.num_shared_experts * moe.expert_size * width
    return 2.0 * (matrices + 3 * chosen * moe.latent_size * moe.expert_size) + 4.0 * count * width


def cases() -> Iterator[GraphCase]:
    """Projections and layers at the widths of `mini` and `k3`."""
    for name, cfg in (("mini", mini()), ("k3", k3())):
        for what, (width, sizes) in projections(cfg).items():
            for batch in BATCHES:
                size = 2.0 * width * sum(sizes)

                def make(
                    batch: int = batch, width: int = width, sizes: list[int] = sizes, size: float = size
                ) -> tuple[Calls, Calls]:
                    pairs = [_project(batch, width, sizes) for _ in range(sets(size))]
                    return [ours for ours, _ in pairs], [peer for _, peer in pairs]

                yield GraphCase(
                    name=f"few_rows_{name}_{what}_b{batch}", shape=f"{batch} x {width} by {sizes} rows", make=make,
                    peer="torch linear, a call a matrix", bytes=size,
                )  # fmt: skip
        for batch in BATCHES:
            size = layer_bytes(batch, cfg)

            def make_layer(batch: int = batch, cfg: ModelConfig = cfg, size: float = size) -> tuple[Calls, Calls]:
                return [_layer(batch, cfg) for _ in range(sets(size) if cfg.hidden_size < 4096 else 2)], []

            yield GraphCase(
                name=f"few_rows_{name}_experts_b{batch}", shape=f"{batch} tokens, a whole layer with experts of {name}",
                make=make_layer, bytes=size,
            )  # fmt: skip
