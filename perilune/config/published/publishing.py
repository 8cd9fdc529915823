"""Making the published configuration of a model of ours, and what goes with it; see `config.published`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from perilune.config.model import ModelConfig
from perilune.config.published.document import PublishedConfig, family, from_json, text_section, to_json
from perilune.config.published.fields import (
    KIMI_K3,
    KIMI_LINEAR,
    REQUIRED,
    TEXT,
    TEXT_CONSTANTS,
    VISION,
    VISION_CONSTANTS,
)
from perilune.config.published.reading import put
from perilune.errors import ConfigError


def publish(
    model: ModelConfig,
    *,
    experts: str | None = None,
    bos: int | None = None,
    eos: int | None = None,
    pad: int | None = None,
    max_positions: int = 1048576,
) -> PublishedConfig:
    """Make the published configuration of a model of ours.

    Args:
        model: of one of the two families.
        experts: mxfp4 | bf16; None = as released: mxfp4 for kimi_k3, bf16 for kimi_linear.
        bos, eos, pad: the tokenizer's special ids; None is written as null.
        max_positions: longest text that a server should accept; the layers themselves have no positions.

    Raises:
        ConfigError: the format has no place for a part of the model; the message names the settings.
    """
    kind = family(model)
    experts = experts or ("mxfp4" if kind == KIMI_K3 else "bf16")
    if experts not in ("mxfp4", "bf16"):
        raise ConfigError(f"experts={experts!r} is not known; allowed: mxfp4, bf16")
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    constants = ("mla_use_nope", "moe_router_activation_func", "moe_layer_freq", "num_expert_group", "topk_group")
    text = {"model_type": KIMI_LINEAR, "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16"}
    if kind == KIMI_K3:
        text |= {key: TEXT_CONSTANTS[key][0] for key in ("tie_word_embeddings", *constants, "topk_method")}
        text |= {"eos_token_id": eos}
    else:
        text |= ids | {key: TEXT_CONSTANTS[key][0] for key in ("tie_word_embeddings", *constants)}
    text |= {"max_position_embeddings": max_positions, "use_grouped_topk": True, "num_nextn_predict_layers": 0}
    text |= {"linear_attn_config": {}}
    for field in TEXT:
        value = field.value(model)
        if not field.twin and (field.default is REQUIRED or value not in (None, False)):
            put(text, field.path, value)
    document = text
    if kind == KIMI_K3:
        vision = None
        if model.vision is not None:
            vision = {"model_type": "kimi_k3_vision", "text_hidden_size": model.hidden_size}
            vision |= {key: allowed[0] for key, allowed in VISION_CONSTANTS.items()}
            vision |= {field.path: field.value(model) for field in VISION}
        document = {
            "architectures": ["KimiK3ForConditionalGeneration"], "model_type": KIMI_K3, "dtype": "bfloat16", **ids,
            "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
        }  # fmt: skip
    made = PublishedConfig(model=model, experts=experts, document=json.dumps(document))
    made = replace(made, document=json.dumps(to_json(made)))
    lost = _differences(canonical(model), from_json(to_json(made)).model)
    if lost:
        raise ConfigError(f"the published {kind} format cannot express {'; '.join(lost)}")
    return made


def canonical(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with settings that say nothing (a size equal to its default, an unused part) as a reader would set them."""
    kda, moe, every = cfg.kda, cfg.moe, cfg.global_every
    if kda is not None:
        kda = replace(
            kda,
            value_head_dim=None if kda.value_head_dim == kda.head_dim else kda.value_head_dim,
            decay_rank=None if kda.decay_rank == kda.head_dim else kda.decay_rank,
            stored_heads=None if kda.stored_heads == kda.num_heads else kda.stored_heads,
        )
    if moe is not None and moe.latent_size is None:
        moe = replace(moe, latent_norm=False)
    for other in (4, *range(1, cfg.num_layers + 1)):
        if replace(cfg, global_every=other).layer_mixers == cfg.layer_mixers:
            every = other
            break
    mixer, softmax = cfg.mixer, cfg.softmax
    if "kda" not in cfg.layer_mixers:
        mixer, every = "kda", 1
    if "softmax" not in cfg.layer_mixers:
        softmax = None
    block = 12 if cfg.residual == "plain" else cfg.attn_res_block_layers
    return replace(cfg, kda=kda, moe=moe, softmax=softmax, mixer=mixer, global_every=every, attn_res_block_layers=block)


def _differences(ours: Any, read: Any, at: str = "model.") -> list[str]:
    """Settings that came back different, in words."""
    found = []
    for name in ours.__dataclass_fields__:
        a, b = getattr(ours, name), getattr(read, name)
        if hasattr(a, "__dataclass_fields__") and hasattr(b, "__dataclass_fields__"):
            found += _differences(a, b, f"{at}{name}.")
        elif a != b:
            found.append(f"{at}{name}={a!r} (it would be read as {b!r})")
    return found


def generation_config(published: PublishedConfig) -> dict[str, Any]:
    """`generation_config.json` (architecture §1.1): the release samples at temperature 1 and stops at the end of a message."""
    document = json.loads(published.document)
    text, _ = text_section(document, published.family)
    ids = {key: document.get(key, text.get(key)) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {key: value for key, value in ids.items() if value is not None} | {"temperature": 1.0, "top_p": 1.0}


def without_extra_layers(published: PublishedConfig) -> PublishedConfig:
    """The configuration for weights without multi-token-prediction layers, which we do not carry over."""
    document = json.loads(published.document)
    text, _ = text_section(document, published.family)
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0
    return replace(published, document=json.dumps(document))
