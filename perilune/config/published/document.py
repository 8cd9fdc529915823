"""`config.json` of the published families `kimi_k3` and `kimi_linear`, both ways (architecture §1).

    published = load_config(folder / "config.json")     read: every key is understood, or named in a ConfigError
    published = publishing.publish(cfg, eos=…)           make one for a model of ours
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
from perilune.config.published.fields import (
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
    Field,
)  # fmt: skip
from perilune.config.published.quantization import expert_format, quantization_block
from perilune.config.published.reading import (
    check_constants,
    check_names,
    put,
    same,
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
    except (ValueError, RecursionError) as error:
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
    text, at = text_section(document, kind)
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


def text_section(document: dict[str, Any], kind: str) -> tuple[dict[str, Any], str]:
    if kind == KIMI_LINEAR:
        return document, ""
    if "text_config" not in document:
        raise ConfigError("text_config is missing; a kimi_k3 configuration keeps the text model's fields there")
    return table_of(document, "text_config", ""), "text_config."


# -- writing --------------------------------------------------------------------------------------------------------


def _sections(
    document: dict[str, Any], model: ModelConfig, kind: str
) -> Iterator[tuple[dict[str, Any], str, Sequence[Field]]]:
    text, at = text_section(document, kind)
    yield text, at, (*TEXT, *FLAT)
    if model.vision is not None and isinstance(document.get("vision_config"), dict):
        yield document["vision_config"], "vision_config.", VISION


def _check_agreement(published: PublishedConfig) -> None:
    """Every field that was read must be what the understood model would write: two fields may not contradict each other."""
    document, model = json.loads(published.document), published.model
    for section, at, fields in _sections(document, model, published.family):
        for field in fields:
            wanted = field.value(model)
            for spelled, stands in spellings(section, field.path):
                if not same(field, stands, model):
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
                if not same(field, stands, model):
                    put(section, spelled, wanted)
            implied = field.default if field.default is not REQUIRED else None
            if not found and not field.twin and wanted != implied and not _told_by_a_twin(section, field.path):
                if not (field.default is None and same(field, None, model)):
                    put(section, field.path, wanted)
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
