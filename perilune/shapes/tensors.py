"""Every tensor of a published checkpoint: name, shape, dtype, bytes (architecture §2).

This table is the one home of checkpoint names and shapes. Parameter counts, checkpoint bytes and the converters derive
from it; for Kimi K3 it gives 497,220 tensors and 1,560,860,324,864 bytes, the totals of the released index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from perilune.config import ModelConfig, VisionConfig
from perilune.config.published import KIMI_K3, family
from perilune.errors import ConfigError

DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
MX_GROUP = 32  # weights that share one E8M0 scale in MXFP4


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: as in the file.
        shape: as in the file.
        dtype: BF16, F32 or U8.
        elements: parameters it stands for (two for each byte of packed 4-bit codes, none for scales).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def _spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, shape, dtype, math.prod(shape))


def is_k3(cfg: ModelConfig) -> bool:
    """True if the config fits the `kimi_k3` family, False if it fits `kimi_linear`.

    Raises:
        ConfigError: it fits neither; the message says why.
    """
    return family(cfg) == KIMI_K3


def _kda(cfg: ModelConfig, at: str) -> Iterator[TensorSpec]:
    kda, width = cfg.kda, cfg.hidden_size
    for name, out in (("q", kda.key_width), ("k", kda.key_width), ("v", kda.value_width)):
        yield _spec(f"{at}{name}_proj.weight", out, width)
    if kda.output_gate_rank is None:
        yield _spec(f"{at}g_proj.weight", kda.value_width, width)
    else:
        yield _spec(f"{at}g_a_proj.weight", kda.output_gate_rank, width)
        yield _spec(f"{at}g_b_proj.weight", kda.value_width, kda.output_gate_rank)
    yield _spec(f"{at}o_proj.weight", width, kda.value_width)
    yield _spec(f"{at}b_proj.weight", kda.num_heads, width)
    yield _spec(f"{at}f_a_proj.weight", kda.rank, width)
    yield _spec(f"{at}f_b_proj.weight", kda.key_width, kda.rank)
    for name, out in (("q", kda.key_width), ("k", kda.key_width), ("v", kda.value_width)):
        yield _spec(f"{at}{name}_conv1d.weight", out, 1, kda.conv_kernel, dtype="F32")
    a_log = (kda.stored_heads or kda.num_heads,) if is_k3(cfg) else (1, 1, kda.num_heads, 1)
    yield _spec(f"{at}A_log", *a_log, dtype="F32")
    yield _spec(f"{at}dt_bias", kda.key_width, dtype="F32")
    yield _spec(f"{at}o_norm.weight", kda.value_dim, dtype="F32")


def _mla(cfg: ModelConfig, at: str) -> Iterator[TensorSpec]:
    mla, width = cfg.mla, cfg.hidden_size
    queries = mla.num_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        yield _spec(f"{at}q_proj.weight", queries, width)
    else:
        yield _spec(f"{at}q_a_proj.weight", mla.q_lora_rank, width)
        yield _spec(f"{at}q_a_layernorm.weight", mla.q_lora_rank)
        yield _spec(f"{at}q_b_proj.weight", queries, mla.q_lora_rank)
    yield _spec(f"{at}kv_a_proj_with_mqa.weight", mla.cache_width, width)
    yield _spec(f"{at}kv_a_layernorm.weight", mla.kv_lora_rank)
    yield _spec(f"{at}kv_b_proj.weight", mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if mla.output_gate:
        yield _spec(f"{at}g_proj.weight", mla.num_heads * mla.v_head_dim, width)
    yield _spec(f"{at}o_proj.weight", width, mla.num_heads * mla.v_head_dim)


def _mlp(at: str, width: int, hidden: int) -> Iterator[TensorSpec]:
    yield _spec(f"{at}gate_proj.weight", hidden, width)
    yield _spec(f"{at}up_proj.weight", hidden, width)
    yield _spec(f"{at}down_proj.weight", width, hidden)


def _packed(name: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    """A 4-bit matrix: two codes a byte (low nibble = even column), one E8M0 scale for 32 columns."""
    if columns % MX_GROUP:
        raise ConfigError(
            f"{name} has {columns} columns; MXFP4 needs a multiple of {MX_GROUP}; export the experts as bf16"
        )
    yield TensorSpec(f"{name}.weight_packed", (rows, columns // 2), "U8", rows * columns)
    yield TensorSpec(f"{name}.weight_scale", (rows, columns // MX_GROUP), "U8", 0)


def _moe(cfg: ModelConfig, at: str, packed: bool) -> Iterator[TensorSpec]:
    moe, width = cfg.moe, cfg.hidden_size
    inner = moe.latent_size or width
    yield _spec(f"{at}gate.weight", moe.num_experts, width)
    yield _spec(f"{at}gate.e_score_correction_bias", moe.num_experts, dtype="F32")
    if moe.latent_size is not None:
        yield _spec(f"{at}routed_expert_down_proj.weight", inner, width)
        if moe.latent_norm:
            yield _spec(f"{at}routed_expert_norm.weight", inner)
        yield _spec(f"{at}routed_expert_up_proj.weight", width, inner)
    if moe.num_shared_experts:
        yield from _mlp(f"{at}shared_experts.", width, moe.num_shared_experts * moe.expert_size)
    for expert in range(moe.num_experts):
        for name, shape in (
            ("w1", (moe.expert_size, inner)),
            ("w3", (moe.expert_size, inner)),
            ("w2", (inner, moe.expert_size)),
        ):
            full = f"{at}experts.{expert}.{name}"
            if packed:
                yield from _packed(full, *shape)
            else:
                yield _spec(f"{full}.weight", *shape)


def text_tensors(cfg: ModelConfig, *, packed_experts: bool) -> Iterator[TensorSpec]:
    """Tensors of the text model in checkpoint order.

    Args:
        cfg: a model of the `kimi_k3` or the `kimi_linear` family.
        packed_experts: routed experts as MXFP4 codes and scales (the K3 release) instead of BF16.

    Raises:
        ConfigError: the model is of no published family, or an expert cannot be packed.
    """
    k3 = is_k3(cfg)
    root = "language_model.model." if k3 else "model."
    width = cfg.hidden_size
    yield _spec(f"{root}embed_tokens.weight", cfg.vocab_size, width)
    for layer in range(cfg.num_layers):
        at = f"{root}layers.{layer}."
        yield from (_kda if cfg.layer_mixers[layer] == "kda" else _mla)(cfg, f"{at}self_attn.")
        if cfg.layer_ffns[layer] == "dense":
            yield from _mlp(f"{at}mlp.", width, cfg.dense_size)
        else:
            yield from _moe(cfg, f"{at}block_sparse_moe.", packed_experts)
        yield _spec(f"{at}input_layernorm.weight", width)
        yield _spec(f"{at}post_attention_layernorm.weight", width)
        if k3:
            for site in ("self_attention", "mlp"):
                yield _spec(f"{at}{site}_res_norm.weight", width)
                yield _spec(f"{at}{site}_res_proj.weight", 1, width)
    yield _spec(f"{root}norm.weight", width)
    if k3:
        yield _spec(f"{root}output_attn_res_norm.weight", width)
        yield _spec(f"{root}output_attn_res_proj.weight", 1, width)
    yield _spec("language_model.lm_head.weight" if k3 else "lm_head.weight", cfg.vocab_size, width)


def vision_tensors(vision: VisionConfig) -> Iterator[TensorSpec]:
    """Tensors of the vision tower MoonViT-V2 (architecture §2.6)."""
    width, attention = vision.hidden_size, vision.num_heads * vision.head_dim
    yield _spec("vision_tower.patch_embed.proj.weight", width, 3, vision.patch_size, vision.patch_size)
    yield _spec("vision_tower.patch_embed.pos_emb.weight", vision.position_grid, vision.position_grid, width)
    for block in range(vision.num_layers):
        at = f"vision_tower.encoder.blocks.{block}."
        yield _spec(f"{at}norm0.weight", width)
        yield _spec(f"{at}norm1.weight", width)
        yield _spec(f"{at}wqkv.weight", 3 * attention, width)
        yield _spec(f"{at}wo.weight", width, attention)
        yield _spec(f"{at}mlp.fc0.weight", vision.mlp_size, width)
        yield _spec(f"{at}mlp.fc1.weight", width, vision.mlp_size)
    yield _spec("vision_tower.encoder.final_layernorm.weight", width)


def projector_tensors(vision: VisionConfig, text_width: int) -> Iterator[TensorSpec]:
    """Tensors of the projector from merged patches into the text model's width."""
    merged = vision.hidden_size * vision.merge**2
    yield _spec("mm_projector.proj.0.weight", merged, merged)
    yield _spec("mm_projector.proj.2.weight", text_width, merged)
    yield _spec("mm_projector.post_norm.weight", text_width)


def checkpoint_tensors(cfg: ModelConfig, *, packed_experts: bool | None = None) -> Iterator[TensorSpec]:
    """All tensors of a published checkpoint; experts are packed by default exactly for the K3 family."""
    packed = is_k3(cfg) if packed_experts is None else packed_experts
    yield from text_tensors(cfg, packed_experts=packed)
    if cfg.vision is not None:
        yield from projector_tensors(cfg.vision, cfg.hidden_size)
        yield from vision_tensors(cfg.vision)
