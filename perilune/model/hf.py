"""Names of the published checkpoints and where each tensor lives in our modules (architecture §2).

One table of links serves both directions: a published tensor is a slice of one of ours, seen in another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.config import ModelConfig
from perilune.errors import CheckpointError
from perilune.model.transformer import Transformer
from perilune.shapes.tensors import is_k3, text_tensors


class Link(NamedTuple):
    """A published tensor and its place.

    Attributes:
        name: published name.
        ours: name of our parameter or buffer.
        rows: slice of its first dimension, or an index of it (an expert).
    """

    name: str
    ours: str
    rows: slice | int


_ALL = slice(None)
_KDA = {"g_proj": "g_proj", "g_a_proj": "g_a_proj", "g_b_proj": "g_b_proj", "o_proj": "o_proj", "b_proj": "b_proj",
        "f_a_proj": "f_a_proj", "f_b_proj": "f_b_proj"}  # fmt: skip
_MLA = {"q_proj": "q_proj", "q_a_proj": "q_a_proj", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b_proj",
        "kv_a_proj_with_mqa": "kv_a_proj", "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b_proj", "g_proj": "g_proj",
        "o_proj": "o_proj"}  # fmt: skip
_MOE = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "router.bias",
        "routed_expert_down_proj.weight": "down_proj.weight", "routed_expert_norm.weight": "norm.weight",
        "routed_expert_up_proj.weight": "up_proj.weight"}  # fmt: skip
_LAYER = {"input_layernorm.weight": "mixer_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
          "self_attention_res_norm.weight": "mixer_read.norm", "self_attention_res_proj.weight": "mixer_read.query",
          "mlp_res_norm.weight": "ffn_read.norm", "mlp_res_proj.weight": "ffn_read.query"}  # fmt: skip
_TOP = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight",
        "output_attn_res_norm.weight": "output_read.norm", "output_attn_res_proj.weight": "output_read.query"}  # fmt: skip


def _kda_link(cfg: ModelConfig, part: str) -> tuple[str, slice]:
    kda = cfg.kda
    first = {"q": 0, "k": kda.key_width, "v": 2 * kda.key_width}
    stop = {"q": kda.key_width, "k": 2 * kda.key_width, "v": kda.conv_width}
    module, _, leaf = part.partition(".")
    if module in ("q_proj", "k_proj", "v_proj"):
        return f"qkv_proj.{leaf}", slice(first[module[0]], stop[module[0]])
    if module in ("q_conv1d", "k_conv1d", "v_conv1d"):
        return "qkv_conv", slice(first[module[0]], stop[module[0]])
    if module in ("A_log", "dt_bias"):
        return module, _ALL
    if module == "o_norm":
        return "o_norm", _ALL
    return f"{_KDA[module]}.{leaf}", _ALL


def _place(cfg: ModelConfig, name: str) -> tuple[str, slice | int]:
    """Our parameter and rows for a published name without its root."""
    if name in _TOP:
        return _TOP[name], _ALL
    if name == "lm_head.weight":
        return name, _ALL
    _, layer, part = name.split(".", 2)
    at = f"layers.{layer}."
    if part in _LAYER:
        return at + _LAYER[part], _ALL
    group, _, rest = part.partition(".")
    if group == "self_attn":
        if cfg.layer_mixers[int(layer)] == "kda":
            ours, rows = _kda_link(cfg, rest)
            return f"{at}mixer.{ours}", rows
        module, _, leaf = rest.partition(".")
        return f"{at}mixer.{_MLA[module]}.{leaf}", _ALL
    if group == "mlp":
        return f"{at}ffn.{rest}", _ALL
    if rest in _MOE:
        return f"{at}ffn.{_MOE[rest]}", _ALL
    if rest.startswith("shared_experts."):
        return f"{at}ffn.shared.{rest.removeprefix('shared_experts.')}", _ALL
    _, expert, matrix, _ = rest.split(".")
    return f"{at}ffn.experts.{matrix}", int(expert)


def links(cfg: ModelConfig) -> Iterator[Link]:
    """All text tensors of the model's published form (experts unpacked), in checkpoint order.

    Raises:
        ConfigError: the model is of no published family.
    """
    root = "language_model." if is_k3(cfg) else ""
    for spec in text_tensors(cfg, packed_experts=False):
        yield Link(spec.name, *_place(cfg, spec.name.removeprefix(root).removeprefix("model.")))


def to_published(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield `(published name, tensor)` of every text tensor, as views of the model's own storage in published shapes."""
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {spec.name: spec.shape for spec in text_tensors(model.cfg, packed_experts=False)}
    for link in links(model.cfg):
        yield link.name, ours[link.ours].detach()[link.rows].reshape(shapes[link.name])


@torch.no_grad()
def load_published(model: Transformer, tensors: Mapping[str, Tensor] | Callable[[str], Tensor]) -> None:
    """Copy published tensors into the model.

    Args:
        model: of the matching family and sizes.
        tensors: a mapping, or a function that fetches a tensor by its published name.

    Raises:
        CheckpointError: a tensor is missing or has another number of elements than the model needs.
    """
    fetch = tensors if callable(tensors) else tensors.__getitem__
    for link, (name, view) in zip(links(model.cfg), to_published(model), strict=True):
        try:
            value = fetch(name)
        except KeyError:
            raise CheckpointError(
                f"the checkpoint has no tensor {name!r}, which this model needs for {link.ours}"
            ) from None
        if value.shape != view.shape:
            raise CheckpointError(f"{name} has shape {tuple(value.shape)}, this model needs {tuple(view.shape)}")
        view.copy_(value)


def kimi_linear_config(
    cfg: ModelConfig, *, bos: int | None = None, eos: int | None = None, pad: int | None = None
) -> dict[str, Any]:
    """`config.json` of a model of the `kimi_linear` family (architecture §1.2); layer lists are 1-based.

    Args:
        cfg: the model.
        bos, eos, pad: the tokenizer's special ids; None is written as null.

    Raises:
        ConfigError: the model is of no published family.
    """
    assert not is_k3(cfg), "kimi_linear has plain residuals and no latent"
    kda, mla, moe = cfg.kda, cfg.mla, cfg.moe
    numbered = list(enumerate(cfg.layer_mixers, start=1))
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "intermediate_size": cfg.dense_size,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_range,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "tie_word_embeddings": False,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": mla.rope_theta is None,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_size,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": moe.routed_scaling_factor,
        "first_k_dense_replace": cfg.dense_layers,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_attn_config": {
            "kda_layers": [i for i, kind in numbered if kind == "kda"],
            "full_attn_layers": [i for i, kind in numbered if kind != "kda"],
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_kernel,
        },
    }
