"""Parameters of a model, counted from its configuration alone (architecture §12.1)."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, SoftmaxConfig
from perilune.shapes.tensors import projector_tensors, vision_tensors


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part.

    Attributes:
        text: the text model, router biases included (they are in the checkpoint).
        vision: the vision tower without projector.
        projector: the projector.
        active: parameters that one token touches, without the input embedding and vision (the report's counting rule).
    """

    text: int
    vision: int
    projector: int
    active: int

    @property
    def total(self) -> int:
        """Everything."""
        return self.text + self.vision + self.projector


def kda_parameters(width: int, kda: KDAConfig, *, per_head_decay: bool = False) -> int:
    """Parameters of a KDA layer's mixer, or with `per_head_decay` of a Gated DeltaNet's."""
    count = width * kda.conv_width + kda.conv_width * kda.conv_kernel + kda.value_width * width
    count += kda.num_heads * width + kda.value_dim  # beta projection, output norm
    if kda.output_gate_rank is None:
        count += kda.value_width * width
    else:
        count += kda.output_gate_rank * (width + kda.value_width)
    if per_head_decay:
        return count + kda.num_heads * (width + 2)
    return count + kda.rank * (width + kda.key_width) + kda.key_width + (kda.stored_heads or kda.num_heads)


def mla_parameters(width: int, mla: MLAConfig) -> int:
    """Parameters of an MLA layer's mixer."""
    queries, values = mla.num_heads * mla.qk_head_dim, mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        count = width * queries
    else:
        count = mla.q_lora_rank * (width + 1 + queries)
    count += mla.cache_width * width + mla.kv_lora_rank
    count += mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    return count + values * width * (2 if mla.output_gate else 1)


def softmax_parameters(width: int, softmax: SoftmaxConfig) -> int:
    """Parameters of a plain softmax layer's mixer."""
    return 4 * width * softmax.num_heads * softmax.head_dim


def expert_parameters(width: int, moe: MoEConfig) -> int:
    """Parameters of one routed expert."""
    return 3 * (moe.latent_size or width) * moe.expert_size


def moe_parameters(width: int, moe: MoEConfig, experts: int) -> int:
    """Parameters of an expert layer with `experts` routed experts counted (all of them, or those one token visits)."""
    count = moe.num_experts * (width + 1) + experts * expert_parameters(width, moe)
    count += 3 * width * moe.num_shared_experts * moe.expert_size
    if moe.latent_size is not None:
        count += 2 * width * moe.latent_size + (moe.latent_size if moe.latent_norm else 0)
    return count


def mixer_parameters(cfg: ModelConfig, kind: str) -> int:
    """Parameters of one layer's mixer of the given kind."""
    if kind in ("kda", "gdn"):
        return kda_parameters(cfg.hidden_size, cfg.kda, per_head_decay=kind == "gdn")
    if kind == "mla":
        return mla_parameters(cfg.hidden_size, cfg.mla)
    return softmax_parameters(cfg.hidden_size, cfg.softmax)


def count_parameters(cfg: ModelConfig) -> ParameterCount:
    """Count the parameters of `cfg`.

    For `presets.k3()`: total 2,779,931,837,184, text 2,779,484,478,208, active 104,189,614,848, vision 401,214,464.
    """
    width = cfg.hidden_size
    shared = sum(mixer_parameters(cfg, kind) for kind in cfg.layer_mixers) + 2 * width * cfg.num_layers + width
    if cfg.residual != "plain":
        shared += 4 * width * cfg.num_layers + 2 * width
    shared += 3 * width * cfg.dense_size * cfg.layer_ffns.count("dense") + cfg.vocab_size * width
    moe_layers = cfg.layer_ffns.count("moe")
    all_experts = visited = 0
    if moe_layers:
        all_experts = moe_layers * moe_parameters(width, cfg.moe, cfg.moe.num_experts)
        visited = moe_layers * moe_parameters(width, cfg.moe, cfg.moe.experts_per_token)
    vision = projector = 0
    if cfg.vision is not None:
        vision = sum(spec.elements for spec in vision_tensors(cfg.vision))
        projector = sum(spec.elements for spec in projector_tensors(cfg.vision, width))
    return ParameterCount(
        text=shared + all_experts + cfg.vocab_size * width, vision=vision, projector=projector, active=shared + visited
    )
