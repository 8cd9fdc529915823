"""Reading the sections of a published `config.json` into our settings; see `config.published`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from perilune.config.model import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from perilune.config.published.fields import (
    ALIASES,
    BALANCER,
    FLAT,
    K3_STORED_HEADS,
    KIMI_K3,
    KIMI_LINEAR,
    OURS,
    REQUIRED,
    SILU,
    SITU,
    TEXT,
    VISION,
    VISION_CONSTANTS,
    VISION_KEPT,
    Field,
)  # fmt: skip
from perilune.errors import ConfigError


def table_of(section: dict[str, Any], key: str, at: str) -> dict[str, Any]:
    """The object under `key`, empty if there is none; `at` is the section's own path, for messages."""
    value = section.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{at}{key}={value!r} must be an object")
    return value


def check_names(
    section: dict[str, Any], at: str, kept: Sequence[str], fields: Sequence[Field] = (), constants: Sequence[str] = (),
) -> None:  # fmt: skip
    """Refuse keys that stand in no list, with the nearest that does."""
    paths = [*kept, *constants, *(field.path for field in fields)]
    if TEXT[0] in fields:
        paths += ALIASES
    tables: dict[str, list[str]] = {"": []}
    for path in paths:
        table, _, leaf = path.rpartition(".")
        tables.setdefault(table, []).append(leaf)
        if table:
            tables[""].append(table)
    for table, known in tables.items():
        for key in section if not table else table_of(section, table, at):
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                where = f"{at}{table}." if table else at
                hint = f"; perhaps you meant {where}{near[0]}" if near else ""
                raise ConfigError(f"unknown field {where}{key}{hint}")


def check_constants(section: dict[str, Any], at: str, constants: dict[str, tuple[Any, ...]]) -> None:
    """Refuse known fields with a value that we do not compute with."""
    spelled = {alias: name for alias, name in ALIASES.items() if name in constants}
    for key, value in section.items():
        name = spelled.get(key, key)
        if name in constants and value not in constants[name]:
            allowed = " or ".join(repr(one) for one in constants[name] if one is not None)
            raise ConfigError(f"{at}{key}={value!r} is not implemented; only {allowed} is")


class Reader:
    """Typed access to a section, under the published names or their aliases."""

    def __init__(self, section: dict[str, Any], at: str, fields: Sequence[Field]) -> None:
        self.section, self.at, self.fields = section, at, {field.path: field for field in fields}

    def has(self, path: str) -> bool:
        """True if the section has the field under one of its names."""
        return any(True for _ in spellings(self.section, path))

    def __call__(self, path: str, default: Any = None) -> Any:
        """The field's value; its default (or the given one) if it is absent or null."""
        field = self.fields[path]
        found = list(spellings(self.section, path))
        if not found:
            if default is None:
                default = field.default
            if default is REQUIRED:
                raise ConfigError(f"{self.at}{path} is missing; it has no default on which the public readers agree")
            return default
        spelled, value = found[0]
        if value is None and field.default is not REQUIRED:
            return field.default
        wrong = isinstance(value, bool) != (field.kind is bool)
        if wrong or not isinstance(value, (int, float) if field.kind is float else field.kind):
            raise ConfigError(f"{self.at}{spelled}={value!r} must be of type {field.kind.__name__}")
        if field.kind is list and {type(item) for item in (value or ())} not in (set(), {int}, {str}):
            raise ConfigError(f"{self.at}{spelled}={value!r} must be a list of whole numbers or of words")
        return float(value) if field.kind is float else value


def spellings(section: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of every spelling of `path` that stands in the section."""
    table, _, leaf = path.rpartition(".")
    inner = section if not table else section.get(table)
    if isinstance(inner, dict):
        for key in (leaf, *(alias for alias, name in ALIASES.items() if name == path)):
            if key in inner:
                yield (f"{table}.{key}" if table else key), inner[key]


def text_model(text: dict[str, Any], at: str, kind: str, ours: dict[str, Any]) -> ModelConfig:
    """The text model that the section `text` (at the path `at`) and our own table describe; `kind` is the family."""
    get, own = Reader(text, at, (*TEXT, *FLAT)), Reader(ours, "perilune.", OURS)
    flat = kind == KIMI_LINEAR and (get.has("layer_types") or get.has("linear_num_heads"))
    if not flat and "mla_use_nope" not in text:
        raise ConfigError(f"{at}mla_use_nope is missing, which the published class reads as rotary positions; only "
                          f"{at}mla_use_nope=true is implemented")  # fmt: skip
    raw = "linear_attn_config." if isinstance(text.get("linear_attn_config"), dict) or not flat else None
    heads, size, taps = (
        get(f"{raw}{name}" if raw else other)
        for name, other in (
            ("num_heads", "linear_num_heads"), ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )  # fmt: skip
    if heads is None or size is None or taps is None:
        raise ConfigError(f"{at}linear_num_heads, linear_head_dim and linear_conv_kernel_dim must all be given")
    full_rank, bound = (get("linear_attn_config.use_full_rank_gate"), get("linear_attn_config.gate_lower_bound"))
    layers, act = get("num_hidden_layers"), get("hidden_act")
    if act not in (SILU, SITU):
        raise ConfigError(f"{at}hidden_act={act!r} is not implemented; only {SILU!r} or {SITU!r} is")
    beta, linear_beta = get("activation_situ_beta"), get("activation_situ_linear_beta")
    if act == SITU:
        beta = beta or 1.0  # the published code reads an absent or zero beta as 1
    else:
        beta, linear_beta = beta or 4.0, 25.0 if linear_beta is None else linear_beta
    latent, block = get("routed_expert_hidden_size"), get("attn_res_block_size")
    stored = own("stored_heads", K3_STORED_HEADS.get((heads, size), heads) if kind == KIMI_K3 else heads)
    return ModelConfig(
        vocab_size=get("vocab_size"), hidden_size=get("hidden_size"), num_layers=layers,
        global_every=_global_every(get, at, layers, raw is not None), residual="plain" if block is None else "block",
        attn_res_block_layers=12 if block is None else block,
        activation="situ" if act == SITU else "swiglu", situ_beta=beta, situ_linear_beta=linear_beta,
        dense_layers=_dense_layers(get, at, layers), dense_size=get("intermediate_size"), norm_eps=get("rms_norm_eps"),
        init_range=get("initializer_range"),
        kda=KDAConfig(
            num_heads=heads, head_dim=size, conv_kernel=taps, gate_lower_bound=bound,
            output_gate_rank=None if full_rank else size, stored_heads=None if stored == heads else stored,
        ),
        mla=MLAConfig(
            num_heads=get("num_attention_heads"), q_lora_rank=get("q_lora_rank"), kv_lora_rank=get("kv_lora_rank"),
            qk_nope_head_dim=get("qk_nope_head_dim"), qk_rope_head_dim=get("qk_rope_head_dim"), v_head_dim=get("v_head_dim"),
            output_gate=get("mla_use_output_gate"), lora_norm_eps=own("lora_norm_eps"),
        ),
        moe=MoEConfig(
            num_experts=get("num_experts"), experts_per_token=get("num_experts_per_token"),
            num_shared_experts=get("num_shared_experts"), expert_size=get("moe_intermediate_size"), latent_size=latent,
            latent_norm=get("latent_moe_use_norm"), renormalize=get("moe_renormalize"),
            routed_scaling_factor=get("routed_scaling_factor"), balancer=own("balancer", BALANCER[kind]),
            balancer_ema=own("balancer_ema"), sign_update=own("sign_update"),
        ),
    )  # fmt: skip


def _dense_layers(get: Reader, at: str, layers: int) -> int:
    kinds = get("mlp_layer_types")
    if get.has("first_k_dense_replace") or kinds is None:
        return get("first_k_dense_replace")
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(f"{at}mlp_layer_types={kinds} is not implemented; only leading 'dense' layers, then 'sparse' ones, "
                          f"{layers} in all")  # fmt: skip
    return dense


def _global_every(get: Reader, at: str, layers: int, raw: bool) -> int:
    """The period that makes our layer pattern out of the lists."""
    if raw:
        kda, full = get("linear_attn_config.kda_layers"), get("linear_attn_config.full_attn_layers")
        name = f"{at}linear_attn_config.full_attn_layers={full}"
        if 0 in [*kda, *full]:
            raise ConfigError(f"{at}linear_attn_config lists layer 0, but layers are counted from 1 there")
        if sorted([*kda, *full]) != list(range(1, layers + 1)):
            odd = sorted(set(range(1, layers + 1)).symmetric_difference({*kda, *full}) | (set(kda) & set(full)))
            raise ConfigError(
                f"{at}linear_attn_config: kda_layers and full_attn_layers must hold each of the layers 1..{layers} once; "
                f"look at {odd or 'repeated entries'}"
            )
    else:
        kinds = get("layer_types")
        if kinds is None:
            raise ConfigError(f"{at}layer_types is missing; its default in transformers is not the released pattern, so name "
                              "every layer")  # fmt: skip
        if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
            raise ConfigError(
                f"{at}layer_types={kinds} must say linear_attention or full_attention for {layers} layers"
            )
        full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
        name = f"{at}layer_types with full attention in {full}"
    candidates = [4, *(n for n in range(1, layers + 1) if n != 4)]
    for every in candidates:
        if full == [n for n in range(1, layers + 1) if n % every == 0 or n == layers]:
            return every
    near = full[0] if full else 4
    shown = [n for n in range(1, layers + 1) if n % near == 0 or n == layers]
    raise ConfigError(f"{name} (counted from 1) is not implemented; a pattern has every n-th layer and the last one, "
                      f"for example {shown}")  # fmt: skip


def vision_model(document: dict[str, Any], ours: dict[str, Any]) -> VisionConfig | None:
    """The vision tower; None if `vision_config` is null. An absent one is the published default, as in the readers."""
    if "vision_config" in document and document["vision_config"] is None:
        return None
    section, at = table_of(document, "vision_config", ""), "vision_config."
    check_names(section, at, VISION_KEPT, VISION, VISION_CONSTANTS)
    check_constants(section, at, VISION_CONSTANTS)
    get, own = Reader(section, at, VISION), Reader(ours, "perilune.", OURS)
    heads, width, merge = get("vt_num_attention_heads"), get("qkv_hidden_size"), get("merge_kernel_size")
    if not heads or width % heads:
        raise ConfigError(f"{at}qkv_hidden_size={width} is not a multiple of {at}vt_num_attention_heads={heads}")
    return VisionConfig(
        hidden_size=get("vt_hidden_size"), num_layers=get("vt_num_hidden_layers"), num_heads=heads, head_dim=width // heads,
        mlp_size=get("vt_intermediate_size"), patch_size=get("patch_size"), position_grid=get("init_pos_emb_height"),
        max_frames=get("init_pos_emb_time"), merge=merge[0] if merge else 0, norm_eps=own("vision_norm_eps"),
    )  # fmt: skip


def same(field: Field, stands: Any, model: ModelConfig) -> bool:
    """True if what stands in a document means what the model says."""
    wanted = field.value(model)
    if stands is None or stands == 0 and field.path == "activation_situ_beta":
        absent = {"num_key_value_heads": wanted, "mm_hidden_size": wanted, "activation_situ_beta": 1.0}
        return wanted in (None, field.default, absent.get(field.path))
    unused = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    if wanted is None and model.activation != "situ" and field.path in unused:
        return stands == unused[field.path]
    return stands == wanted


def put(section: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at a dotted path of the section."""
    table, _, leaf = path.rpartition(".")
    inner = section.setdefault(table, {}) if table else section
    inner[leaf] = value
