"""`config.json` of the published families `kimi_k3` and `kimi_linear`, both ways (architecture §1).

    published = load_config(folder / "config.json")     read: every key is understood, or named in a ConfigError
    published = publish(cfg, eos=…)                      make one for a model of ours
    to_json(published)                                   the document; what was read comes back as it was

The document that was read stays inside `PublishedConfig`, because it holds what a ModelConfig has no place for. Writing
lays the model's values over it, so an unchanged model gives the same document and a changed one changes only its own keys.
The family follows from the *top-level* architecture: the text section of Kimi K3 names the class of Kimi-Linear.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perilune.config.model import ModelConfig
from perilune.config.published_fields import (
    BALANCER,
    FLAT,
    K3_STORED_HEADS,
    KIMI_K3,
    KIMI_LINEAR,
    OURS,
    REQUIRED,
    TEXT,
    TEXT_CONSTANTS,
    TEXT_KEPT,
    TOP_KEPT,
    VISION,
    VISION_CONSTANTS,
    Field,
)  # fmt: skip
from perilune.config.published_quantization import expert_format, quantization_block
from perilune.config.published_reading import (
    check_constants,
    check_names,
    spellings,
    table_of,
    text_model,
    vision_model,
)
from perilune.errors import ConfigError

ARCHITECTURES = {"KimiK3ForConditionalGeneration": KIMI_K3, "KimiLinearForCausalLM": KIMI_LINEAR}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedConfig:
    """A model in a published family.

    Attributes:
        model: the model.
        experts: how routed experts are stored: mxfp4 | bf16.
        document: JSON text from which fields without a place in `model` are kept.
    """

    model: ModelConfig
    experts: str
    document: str

    @property
    def family(self) -> str:
        """kimi_k3 | kimi_linear."""
        return _family_of_document(json.loads(self.document))


def family(cfg: ModelConfig) -> str:
    """The published family that `cfg` fits: kimi_k3 | kimi_linear.

    Raises:
        ConfigError: it fits neither; the message says why.
    """
    if set(cfg.layer_mixers) - {"kda", "mla"} or cfg.kda is None or cfg.mla is None or cfg.moe is None:
        raise ConfigError(
            f"published checkpoints have kda and mla layers and experts; this model has {sorted(set(cfg.layer_mixers))}"
        )
    if cfg.mla.rope_theta is not None:
        raise ConfigError(f"model.mla.rope_theta={cfg.mla.rope_theta:g}: the published families have no positions; "
                          "only a model with rope_theta none can be published")  # fmt: skip
    k3 = cfg.residual == "block" and cfg.moe.latent_size is not None
    if not k3 and (cfg.residual != "plain" or cfg.moe.latent_size is not None):
        same = "; residual 'full' is residual 'block' with attn_res_block_layers=1" if cfg.residual == "full" else ""
        raise ConfigError(
            f"residual={cfg.residual!r} with latent_size={cfg.moe.latent_size} is in no published family; "
            f"kimi_k3 has block residuals and a latent, kimi_linear plain residuals and none{same}"
        )
    if not k3 and cfg.vision is not None:
        raise ConfigError("model.vision is set, but kimi_linear has no vision tower; set model.vision to none")
    return KIMI_K3 if k3 else KIMI_LINEAR


# -- reading --------------------------------------------------------------------------------------------------------


def load_config(path: Path) -> PublishedConfig:
    """Read a published `config.json`.

    Raises:
        ConfigError: not readable, not JSON, or see `from_json`.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    try:
        return from_json(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_json(document: Any) -> PublishedConfig:
    """Understand a published configuration.

    Raises:
        ConfigError: an architecture or a key that is not known (with the nearest one), a key that is missing, a value of
            the wrong type, a value that we do not implement, or two keys that contradict each other.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration is a {type(document).__name__}, not a JSON object")
    kind = _family_of_document(document)
    text, at = _text_section(document, kind)
    if kind == KIMI_K3:
        check_names(document, "", TOP_KEPT)
        check_constants(document, "", {"tie_word_embeddings": (False,)})
        for key in ("hidden_size", "vocab_size"):
            if key in document and document[key] != text.get(key):
                raise ConfigError(f"{key}={document[key]!r} contradicts text_config.{key}={text.get(key)!r}")
    check_names(text, at, (*TEXT_KEPT, *(("perilune",) if kind == KIMI_LINEAR else ())), (*TEXT, *FLAT), TEXT_CONSTANTS)
    check_constants(text, at, TEXT_CONSTANTS)
    ours = table_of(document, "perilune", "")
    check_names(ours, "perilune.", (), OURS)
    model = text_model(text, at, kind, ours)
    if kind == KIMI_K3:
        model = replace(model, vision=vision_model(document, ours))
    found = family(model)
    if found != kind:
        raise ConfigError(
            f"the architecture is that of {kind}, but {at}attn_res_block_size={text.get('attn_res_block_size')!r} and "
            f"{at}routed_expert_hidden_size={text.get('routed_expert_hidden_size')!r} are those of {found}"
        )
    published = PublishedConfig(
        model=model, experts=expert_format(document, text if kind == KIMI_K3 else None), document=json.dumps(document)
    )
    _check_agreement(published)
    return published


def _family_of_document(document: dict[str, Any]) -> str:
    names, kind = document.get("architectures"), document.get("model_type")
    if names is None and kind in (KIMI_K3, KIMI_LINEAR):
        return kind
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, n=1)
        hint = f"; perhaps you meant {near[0]}" if near else ""
        raise ConfigError(f"architectures={names!r} is not known{hint}. Known: {', '.join(ARCHITECTURES)}")
    if kind is not None and kind != ARCHITECTURES[name]:
        raise ConfigError(
            f"model_type={kind!r} contradicts architectures={names!r}, whose type is {ARCHITECTURES[name]!r}"
        )
    return ARCHITECTURES[name]


def _text_section(document: dict[str, Any], kind: str) -> tuple[dict[str, Any], str]:
    if kind == KIMI_LINEAR:
        return document, ""
    if "text_config" not in document:
        raise ConfigError("text_config is missing; a kimi_k3 configuration keeps the text model's fields there")
    return table_of(document, "text_config", ""), "text_config."


# -- writing --------------------------------------------------------------------------------------------------------


def _sections(
    document: dict[str, Any], model: ModelConfig, kind: str
) -> Iterator[tuple[dict[str, Any], str, Sequence[Field]]]:
    text, at = _text_section(document, kind)
    yield text, at, (*TEXT, *FLAT)
    if model.vision is not None and isinstance(document.get("vision_config"), dict):
        yield document["vision_config"], "vision_config.", VISION


def _same(field: Field, stands: Any, model: ModelConfig) -> bool:
    """True if what stands in a document means what the model says."""
    wanted = field.value(model)
    if stands is None or stands == 0 and field.path == "activation_situ_beta":
        absent = {"num_key_value_heads": wanted, "mm_hidden_size": wanted, "activation_situ_beta": 1.0}
        return wanted in (None, field.default, absent.get(field.path))
    unused = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    if wanted is None and model.activation != "situ" and field.path in unused:
        return stands == unused[field.path]
    return stands == wanted


def _check_agreement(published: PublishedConfig) -> None:
    """Every field that was read must be what the understood model would write: two fields may not contradict each other."""
    document, model = json.loads(published.document), published.model
    for section, at, fields in _sections(document, model, published.family):
        for field in fields:
            wanted = field.value(model)
            for spelled, stands in spellings(section, field.path):
                if not _same(field, stands, model):
                    raise ConfigError(f"{at}{spelled}={stands!r} contradicts the other fields, which say {wanted!r}")


def to_json(published: PublishedConfig) -> dict[str, Any]:
    """The `config.json` of `published`: its document, with the model's values laid over it."""
    document, model, kind = copy.deepcopy(json.loads(published.document)), published.model, published.family
    if kind == KIMI_K3 and model.vision is None:
        document["vision_config"] = None
    elif kind == KIMI_K3 and document.get("vision_config", {}) is None:
        document["vision_config"] = {}
    for section, _, fields in _sections(document, model, kind):
        for field in fields:
            wanted, found = field.value(model), list(spellings(section, field.path))
            for spelled, stands in found:
                if not _same(field, stands, model):
                    _put(section, spelled, wanted)
            implied = field.default if field.default is not REQUIRED else None
            if not found and not field.twin and wanted != implied and not _told_by_a_twin(section, field.path):
                if not (field.default is None and _same(field, None, model)):
                    _put(section, field.path, wanted)
    usual, ours = _usual(model, kind), table_of(document, "perilune", "")
    table = {field.path: field.value(model) for field in OURS}
    table = {key: value for key, value in table.items() if key in ours or value != usual[key]}
    if table:
        document["perilune"] = table
    text = document["text_config"] if kind == KIMI_K3 else document
    present = [section for section in (document, text) if section.get("quantization_config") is not None]
    if published.experts == "bf16":
        for section in present:
            del section["quantization_config"]
    elif not present:
        text["quantization_config"] = quantization_block()
    return document


def _usual(model: ModelConfig, kind: str) -> dict[str, Any]:
    heads = model.kda.num_heads
    stored = K3_STORED_HEADS.get((heads, model.kda.head_dim), heads) if kind == KIMI_K3 else heads
    own = {"balancer": BALANCER[kind], "stored_heads": stored}
    return {field.path: own.get(field.path, field.default) for field in OURS}


_TWINS = {
    "linear_attn_config.kda_layers": "layer_types", "linear_attn_config.full_attn_layers": "layer_types",
    "linear_attn_config.num_heads": "linear_num_heads", "linear_attn_config.head_dim": "linear_head_dim",
    "linear_attn_config.short_conv_kernel_size": "linear_conv_kernel_dim", "first_k_dense_replace": "mlp_layer_types",
}  # fmt: skip


def _told_by_a_twin(section: dict[str, Any], path: str) -> bool:
    return path in _TWINS and _TWINS[path] in section


def _put(section: dict[str, Any], path: str, value: Any) -> None:
    table, _, leaf = path.rpartition(".")
    inner = section.setdefault(table, {}) if table else section
    inner[leaf] = value


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
            _put(text, field.path, value)
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
    text, _ = _text_section(document, published.family)
    ids = {key: document.get(key, text.get(key)) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {key: value for key, value in ids.items() if value is not None} | {"temperature": 1.0, "top_p": 1.0}


def without_extra_layers(published: PublishedConfig) -> PublishedConfig:
    """The configuration for weights without multi-token-prediction layers, which we do not carry over."""
    document = json.loads(published.document)
    text, _ = _text_section(document, published.family)
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0
    return replace(published, document=json.dumps(document))
