"""Every field of a published `config.json`: where it stands, what it says about our model, what may be absent.

One table for both directions (architecture §1.2, §1.3). `path` is dotted inside its section, `text_config` or
`vision_config`; for Kimi-Linear the text section is the document itself. Keys that no code of ours reads (token ids, data
types, remote code …) are listed by name, so that an unknown key is still an error. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perilune.config.model import ModelConfig

REQUIRED = object()
"""Default of a field that must be there: the public readers assume different values for it."""

SILU, SITU = "silu", "situ"
KIMI_K3, KIMI_LINEAR = "kimi_k3", "kimi_linear"
K3_STORED_HEADS = {(96, 128): 128}
"""Length of A_log by (heads, head size): the released file stores 128 entries and uses 96; other sizes store what they use."""
BALANCER = {KIMI_K3: "quantile", KIMI_LINEAR: "sign"}
"""How each family was trained to balance its experts."""


@dataclass(frozen=True, slots=True)
class Field:
    """One key.

    Attributes:
        path: where, dotted.
        kind: type of its value (float takes whole numbers too).
        value: what a model says there; not called for a model without that part.
        default: what the published classes assume when the key is absent, or REQUIRED.
        twin: a second spelling of a fact that another field carries: checked and kept up to date where it stands, never
            added.
    """

    path: str
    kind: type
    value: Callable[[ModelConfig], Any]
    default: Any = REQUIRED
    twin: bool = False


def _one_based(cfg: ModelConfig, kind: str) -> list[int]:
    return [number for number, mixer in enumerate(cfg.layer_mixers, start=1) if mixer == kind]


def _situ(cfg: ModelConfig, value: float | None, default: float) -> float | None:
    """A cap is written where it acts, and where an unused one is not our default."""
    return value if cfg.activation == "situ" or value != default else None


TEXT: tuple[Field, ...] = (
    Field("vocab_size", int, lambda m: m.vocab_size),
    Field("hidden_size", int, lambda m: m.hidden_size),
    Field("num_hidden_layers", int, lambda m: m.num_layers),
    Field("intermediate_size", int, lambda m: m.dense_size),
    Field("num_attention_heads", int, lambda m: m.mla.num_heads),
    Field("num_key_value_heads", int, lambda m: m.mla.num_heads, None),
    Field("hidden_act", str, lambda m: SITU if m.activation == "situ" else SILU, SILU),
    Field("activation_situ_beta", float, lambda m: _situ(m, m.situ_beta, 4.0), None),
    Field("activation_situ_linear_beta", float, lambda m: _situ(m, m.situ_linear_beta, 25.0), None),
    Field("rms_norm_eps", float, lambda m: m.norm_eps),
    Field("initializer_range", float, lambda m: m.init_range, 0.02),
    Field("q_lora_rank", int, lambda m: m.mla.q_lora_rank, None),
    Field("kv_lora_rank", int, lambda m: m.mla.kv_lora_rank),
    Field("qk_nope_head_dim", int, lambda m: m.mla.qk_nope_head_dim),
    Field("qk_rope_head_dim", int, lambda m: m.mla.qk_rope_head_dim),
    Field("qk_head_dim", int, lambda m: m.mla.qk_head_dim, None, twin=True),
    Field("v_head_dim", int, lambda m: m.mla.v_head_dim),
    Field("mla_use_output_gate", bool, lambda m: m.mla.output_gate, False),
    Field("num_experts", int, lambda m: m.moe.num_experts),
    Field("num_experts_per_token", int, lambda m: m.moe.experts_per_token),
    Field("num_shared_experts", int, lambda m: m.moe.num_shared_experts),
    Field("moe_intermediate_size", int, lambda m: m.moe.expert_size),
    Field("routed_expert_hidden_size", int, lambda m: m.moe.latent_size, None),
    Field("latent_moe_use_norm", bool, lambda m: m.moe.latent_norm and m.moe.latent_size is not None, False),
    Field("moe_renormalize", bool, lambda m: m.moe.renormalize, True),
    Field("routed_scaling_factor", float, lambda m: m.moe.routed_scaling_factor),
    Field("first_k_dense_replace", int, lambda m: m.dense_layers),
    Field("attn_res_block_size", int, lambda m: m.attn_res_block_layers if m.residual == "block" else None, None),
    Field("linear_attn_config.kda_layers", list, lambda m: _one_based(m, "kda")),
    Field("linear_attn_config.full_attn_layers", list, lambda m: _one_based(m, "mla")),
    Field("linear_attn_config.num_heads", int, lambda m: m.kda.num_heads),
    Field("linear_attn_config.head_dim", int, lambda m: m.kda.head_dim),
    Field("linear_attn_config.short_conv_kernel_size", int, lambda m: m.kda.conv_kernel),
    Field("linear_attn_config.gate_lower_bound", float, lambda m: m.kda.gate_lower_bound, None),
    Field("linear_attn_config.use_full_rank_gate", bool, lambda m: m.kda.output_gate_rank is None, False),
)  # fmt: skip

FLAT: tuple[Field, ...] = (
    Field("layer_types", list,
          lambda m: ["linear_attention" if kind == "kda" else "full_attention" for kind in m.layer_mixers], None, twin=True),
    Field("mlp_layer_types", list,
          lambda m: ["dense" if kind == "dense" else "sparse" for kind in m.layer_ffns], None, twin=True),
    Field("linear_num_heads", int, lambda m: m.kda.num_heads, None, twin=True),
    Field("linear_head_dim", int, lambda m: m.kda.head_dim, None, twin=True),
    Field("linear_conv_kernel_dim", int, lambda m: m.kda.conv_kernel, None, twin=True),
)  # fmt: skip
"""The second schema of `kimi_linear`: transformers' own, without `linear_attn_config` (architecture §1.5)."""

ALIASES = {
    "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group", "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
    "model_max_length": "max_position_embeddings",
}  # fmt: skip
"""Other names of text fields that transformers writes or reads."""

TEXT_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "num_expert_group": (1, None),
    "topk_group": (1, None),
    "topk_method": ("noaux_tc", None),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "logit_scale": (1.0, None),
}
"""Known fields with the only values that we compute with; the first is what a new document gets, where it writes them."""

_ANY_SECTION = (
    "architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "_attn_implementation", "attn_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "use_cache",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label",
    "label2id", "problem_type", "tokenizer_class",
)  # fmt: skip
TEXT_KEPT = (
    *_ANY_SECTION, "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "use_grouped_topk",
    "num_nextn_predict_layers", "mamba_ssm_dtype", "min_moe_intermediate_per_partition", "output_router_logits",
    "pretraining_tp", "quantization_config",
)  # fmt: skip
"""Text keys without an effect on our model: kept as they are. Rotary settings have none, since every layer is NoPE."""

TOP_KEPT = (
    *_ANY_SECTION, "text_config", "vision_config", "ignore_index", "media_placeholder_token_id", "image_placeholder",
    "tie_word_embeddings", "quantization_config", "hidden_size", "vocab_size", "perilune",
)  # fmt: skip
"""Keys of the top level of `kimi_k3`."""

VISION: tuple[Field, ...] = (
    Field("patch_size", int, lambda m: m.vision.patch_size, 14),
    Field("init_pos_emb_height", int, lambda m: m.vision.position_grid, 64),
    Field("init_pos_emb_width", int, lambda m: m.vision.position_grid, 64),
    Field("init_pos_emb_time", int, lambda m: m.vision.max_frames, 4),
    Field("vt_num_attention_heads", int, lambda m: m.vision.num_heads, 12),
    Field("vt_num_hidden_layers", int, lambda m: m.vision.num_layers, 27),
    Field("vt_hidden_size", int, lambda m: m.vision.hidden_size, 1024),
    Field("vt_intermediate_size", int, lambda m: m.vision.mlp_size, 4096),
    Field("qkv_hidden_size", int, lambda m: m.vision.num_heads * m.vision.head_dim, 1536),
    Field("merge_kernel_size", list, lambda m: [m.vision.merge, m.vision.merge], [2, 2]),
    Field("mm_hidden_size", int, lambda m: m.vision.hidden_size, None),
)  # fmt: skip

VISION_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "pos_emb_type": ("divided_fixed",),
    "pos_emb_interpolation_mode": ("bilinear",),
    "merge_type": ("sd2_tpool",),
    "norm_type": ("rmsnorm",),
    "attn_bias": (False,),
    "linear_bias": (False,),
    "patch_embed_proj_bias": (False,),
    "mlp_type": ("mlp2",),
    "activation_func": ("gelu_pytorch_tanh",),
    "mm_projector_type": ("patchmergerv2",),
    "projector_hidden_act": ("gelu",),
    "projector_ln_eps": (1e-5,),
}
VISION_KEPT = (*_ANY_SECTION, "video_attn_type", "text_hidden_size")
"""No reader uses `video_attn_type`; `text_hidden_size` is overwritten by the text section's width."""

OURS: tuple[Field, ...] = (
    Field("lora_norm_eps", float, lambda m: m.mla.lora_norm_eps, 1e-6),
    Field("balancer", str, lambda m: m.moe.balancer),
    Field("balancer_ema", float, lambda m: m.moe.balancer_ema, 0.0),
    Field("sign_update", float, lambda m: m.moe.sign_update, 1e-3),
    Field("stored_heads", int, lambda m: m.kda.stored_heads or m.kda.num_heads),
    Field("vision_norm_eps", float, lambda m: m.vision.norm_eps if m.vision else None, None),
)
"""Our own table `perilune`, written only where a value is not the family's: the published format has no place for how the
router's bias is trained, for the length of A_log, nor for eps values in which public readers differ (architecture §4.4)."""
