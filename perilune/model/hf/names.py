"""Names of the published checkpoints and where each tensor lives in our modules (architecture §2).

One table of links serves both directions: a published tensor is a slice of one of ours, seen in another shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.config import ModelConfig
from perilune.model.transformer import Transformer
from perilune.shapes.tensors import checkpoint_tensors, is_k3


class Place(NamedTuple):
    """Where a published tensor lies in a parameter of ours: `count` elements of the flattened parameter, from `start` on.

    Both sides are row-major and a published tensor is whole rows of ours, so the elements are contiguous on both.
    """

    name: str
    ours: str
    start: int
    count: int


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
    if name.startswith(("vision_tower.", "mm_projector.")):
        return name, _ALL  # our modules bear the published names
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
    """All tensors of the model's published form (experts unpacked), in checkpoint order.

    Raises:
        ConfigError: the model is of no published family.
    """
    root = "language_model." if is_k3(cfg) else ""
    for spec in checkpoint_tensors(cfg, packed_experts=False):
        yield Link(spec.name, *_place(cfg, spec.name.removeprefix(root).removeprefix("model.")))


def to_published(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield `(published name, tensor)` of every tensor, as views of the model's own storage in published shapes."""
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {spec.name: spec.shape for spec in checkpoint_tensors(model.cfg, packed_experts=False)}
    for link in links(model.cfg):
        yield link.name, ours[link.ours].detach()[link.rows].reshape(shapes[link.name])


def own_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the model's state dict, in its order, without storage for them."""
    with torch.device("meta"):
        model = Transformer(cfg)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def places(cfg: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[Place]:
    """The links of `cfg` as ranges of elements; `shapes` are those of our tensors (`own_shapes`)."""
    for link in links(cfg):
        shape = shapes[link.ours]
        row = math.prod(shape[1:])
        if isinstance(link.rows, int):
            yield Place(link.name, link.ours, link.rows * row, row)
        else:
            first, stop, _ = link.rows.indices(shape[0])
            yield Place(link.name, link.ours, first * row, (stop - first) * row)
