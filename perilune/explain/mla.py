"""Gated MLA without positions: a small cache, and a history whose order does not matter."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from perilune.config.model import MLAConfig, ModelConfig
from perilune.config.presets import k3
from perilune.explain.chart import Bars, LineChart, Series
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.model.mla import GatedMLA
from perilune.ops import mla as op
from perilune.shapes.cache import cache_bytes_per_token, recurrent_bytes


def explain(subject: Subject) -> Explanation:
    """Cache sizes, permutation of the history with and without positions, absorbed against rebuilt keys."""
    layer = copy.deepcopy(next(iter(subject.mixers(GatedMLA).values()))).double().eval()
    mla = layer.mla
    x_BTD = torch.randn(1, 48, subject.cfg.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = permutation_change(layer, x_BTD)
    turned = permutation_change(rotated(layer, subject.cfg), x_BTD)
    op_error, absorbed = differences(layer, x_BTD)
    sizes = cache_numbers(mla)
    published = k3()
    contexts = [4**i for i in range(3, 11)]
    per_token, fixed = cache_bytes_per_token(published), recurrent_bytes(published)
    every = published.num_layers * cache_numbers(published.mla)["keys and values of all heads"] * 2
    lines = {
        "24 MLA layers": [per_token * n for n in contexts],
        "69 KDA layers": [float(fixed)] * len(contexts),
        "if all 93 layers kept keys and values": [every * n for n in contexts],
    }
    return Explanation(
        name="mla",
        title="Gated multi-head latent attention (MLA)",
        source="K3 report §2.1.2, Eq. 7",
        formula=(
            "[c | r] = W_kva x,   c′ = RMSNorm(c)          only [c′ | r] is cached",
            "[k_n | v] = W_kvb c′  a head,   k = [k_n | r]   r is shared by all heads",
            "y = W_o ( softmax(q kᵀ / √(n + r), causal) v · σ(W_g x) )",
            "decode:  q_n W_UK in the latent space, so the cache is read as it is",
        ),
        unusual=(
            "No positional encoding: the KDA layers around it carry the order, so nothing has to be retuned for longer contexts.",
            "The slice that other models rotate exists and takes part, unrotated; the scale counts it.",
            "The gate reads the layer's input, channel by channel, before the output projection.",
            "Training keeps the attention output in fp32 up to the gate.",
        ),
        reference=attention_as_written,
        findings=[
            f"Cache a token and layer: {sizes['latent']} numbers instead of {sizes['keys and values of all heads']} "
            f"({sizes['keys and values of all heads'] / sizes['latent']:.1f}× less); K3: {cache_numbers(published.mla)['latent']} instead of "
            f"{cache_numbers(published.mla)['keys and values of all heads']}.",
            f"Shuffling the history changes the last token's output by {plain:.1e}; with rotary positions by {turned:.1e}.",
            f"From the code above, the op in use differs by {op_error:.1e}, and the absorbed form of decoding by {absorbed:.1e}.",
            f"K3 at a million tokens: {per_token * 2**20 / 2**30:.1f} GiB of cache and {fixed / 2**30:.2f} GiB of KDA state a sequence.",
        ],
        numbers={
            "cache_numbers_per_token_and_layer": sizes,
            "k3_cache_bytes_per_token": per_token,
            "k3_state_bytes": fixed,
            "permutation_change": plain,
            "permutation_change_with_rotation": turned,
            "op_difference": op_error,
            "absorbed_difference": absorbed,
        },
        charts=[
            LineChart(
                title="Memory of one sequence in K3, by length",
                series=[Series(name=name, x=contexts, y=values) for name, values in lines.items()],
                x_label="tokens of context",
                y_label="bytes",
                x_log=True,
                y_log=True,
                caption="KDA layers cost the same at any length; the few MLA layers grow slowly; ordinary attention would not fit.",
            ),
            Bars(
                title="Change of the last output when the history is shuffled",
                categories=["as it is (no positions)", "with rotary positions"],
                groups=[("largest change ÷ largest output", [max(plain, 1e-18), turned])],
                y_label="relative change",
                y_log=True,
                caption="Without positions attention is a set operation: only rounding is left. Rotation makes the order count.",
            ),
        ],
        next=("perilune explain kda", "perilune inspect --preset k3"),
    )


def cache_numbers(mla: MLAConfig | None) -> dict[str, int]:
    """Numbers cached for a token in one layer: the latent form, and keys and values of all heads."""
    assert mla is not None, "the model has MLA settings"
    return {
        "latent": mla.cache_width,
        "keys and values of all heads": mla.num_heads * (mla.qk_head_dim + mla.v_head_dim),
    }


@torch.no_grad()
def permutation_change(layer: GatedMLA, x_BTD: Tensor) -> float:
    """Largest relative change of the last token's output when all earlier tokens are shuffled."""
    last = x_BTD.shape[1] - 1
    order = torch.cat([torch.randperm(last, generator=torch.Generator().manual_seed(1)), torch.tensor([last])])
    out = layer(x_BTD)[0][:, -1]
    return float((layer(x_BTD[:, order])[0][:, -1] - out).abs().max() / out.abs().max())


def rotated(layer: GatedMLA, cfg: ModelConfig) -> GatedMLA:
    """The same weights with rotary positions on the shared slice."""
    assert cfg.mla is not None, "the model has MLA settings"
    turned = GatedMLA(replace(cfg, mla=replace(cfg.mla, rope_theta=10000.0))).double().eval()
    turned.load_state_dict(layer.state_dict())
    return turned


def attention_as_written(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, scale: float) -> Tensor:
    """Causal softmax attention, as the formula says it and without any care for memory or speed."""
    tokens = q_BTHK.shape[1]
    scores = scale * torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v_BTHV)


@torch.no_grad()
def differences(layer: GatedMLA, x_BTD: Tensor) -> tuple[float, float]:
    """Largest relative difference to the formula: of the op over rebuilt keys and values, and of the absorbed form."""
    q_nope, q_shared = layer.queries(x_BTD)
    latent, shared = layer.latents(x_BTD)
    keys, values = layer.expand(latent, shared)
    q = torch.cat((q_nope, q_shared), dim=-1)
    written = attention_as_written(q, keys, values, layer.scale)
    rebuilt = op.attend(q, keys, values, layer.scale)
    weight = layer.kv_b_proj.weight.view(layer.mla.num_heads, -1, layer.mla.kv_lora_rank)
    up_k, up_v = weight.split((layer.mla.qk_nope_head_dim, layer.mla.v_head_dim), dim=1)
    absorbed = op.attend_latent(q_nope, q_shared, latent, shared, up_k, up_v, layer.scale, 0)
    size = written.abs().max()
    return float((rebuilt - written).abs().max() / size), float((absorbed - written).abs().max() / size)
