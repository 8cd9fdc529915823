"""The `quantization_config` of a published checkpoint: routed experts in MXFP4, or nothing (architecture §9.1).

The block may stand in the text section (the release), at the top level (where readers hoist it), or both; its format key at
the block's own level, in its groups, or both. Which tensors are packed follows from the file, never from the block's ignore
patterns: those do not name all of the tensors that are in BF16.
"""

from __future__ import annotations

from typing import Any

from perilune.errors import ConfigError

METHOD, FORMAT = "compressed-tensors", "mxfp4-pack-quantized"
IGNORED = (
    "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    "re:.*vision_tower.*", "re:.*mm_projector.*",
)  # fmt: skip
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,), "type": ("float",), "symmetric": (True,), "strategy": ("group",), "group_size": (32,),
    "dynamic": (False,), "scale_dtype": ("torch.uint8", None),
}  # fmt: skip
_WEIGHTS_KEPT = ("observer", "observer_kwargs", "actorder", "block_structure", "zp_dtype")
_GROUP: dict[str, tuple[Any, ...]] = {
    "format": (FORMAT, None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_BLOCK: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,), "format": (FORMAT, None), "kv_cache_scheme": (None,),
    "quantization_status": ("compressed", None), "sparsity_config": (None, {}), "transform_config": (None, {}),
}  # fmt: skip
_BLOCK_KEPT = ("config_groups", "ignore", "global_compression_ratio", "version")


def quantization_block() -> dict[str, Any]:
    """The block of the K3 release."""
    weights = {key: allowed[0] for key, allowed in _WEIGHTS.items()} | {"observer": "minmax"}
    group = {"format": FORMAT, "targets": ["Linear"], "input_activations": None, "weights": weights}
    return {
        "quant_method": METHOD, "quantization_status": "compressed", "format": FORMAT, "kv_cache_scheme": None,
        "config_groups": {"group_0": group}, "ignore": list(IGNORED),
    }  # fmt: skip


def expert_format(document: dict[str, Any], text: dict[str, Any] | None) -> str:
    """How the routed experts are stored, from the blocks at the top level and in the text section: mxfp4 | bf16.

    Raises:
        ConfigError: another quantisation than the release's, or two blocks that differ.
    """
    places = [("quantization_config", document)]
    if text is not None:
        places.append(("text_config.quantization_config", text))
    found = {
        at: section["quantization_config"] for at, section in places if section.get("quantization_config") is not None
    }
    if not found:
        return "bf16"
    for at, block in found.items():
        _check_block(at, block)
    if len(found) == 2 and len({repr(sorted(block.items())) for block in found.values()}) == 2:
        raise ConfigError("quantization_config and text_config.quantization_config differ; keep one of them")
    return "mxfp4"


def _check(at: str, section: Any, allowed: dict[str, tuple[Any, ...]], kept: tuple[str, ...]) -> None:
    if not isinstance(section, dict):
        raise ConfigError(f"{at}={section!r} must be an object")
    for key, value in section.items():
        if key not in allowed and key not in kept:
            raise ConfigError(f"unknown field {at}.{key}")
        if key in allowed and value not in allowed[key]:
            raise ConfigError(f"{at}.{key}={value!r} is not implemented; only {allowed[key][0]!r} is")


def _check_block(at: str, block: Any) -> None:
    _check(at, block, _BLOCK, _BLOCK_KEPT)
    groups = block.get("config_groups")
    if block.get("quant_method") is None or not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{at} must have quant_method and config_groups")
    for name, group in groups.items():
        where = f"{at}.config_groups.{name}"
        _check(where, group, _GROUP, ("weights", "targets"))
        if (group.get("format") or block.get("format")) is None:
            raise ConfigError(f"{where}.format is missing, and so is {at}.format; only {FORMAT!r} is implemented")
        weights = group.get("weights")
        _check(f"{where}.weights", weights, _WEIGHTS, _WEIGHTS_KEPT)
        for key in ("num_bits", "type", "group_size"):
            if key not in weights:
                raise ConfigError(f"{where}.weights.{key} is missing; only {_WEIGHTS[key][0]!r} is implemented")
