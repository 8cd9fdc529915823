"""`perilune inspect`: what a model weighs, what it costs a token, and what a sequence occupies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.config import ModelConfig
from perilune.config.parse import from_dict, load_toml, parse_flags
from perilune.config.presets import preset
from perilune.config.published import load_config
from perilune.errors import ConfigError
from perilune.rundir import RunDir
from perilune.shapes.cache import cache_bytes_per_token, recurrent_bytes
from perilune.shapes.counts import count_parameters
from perilune.shapes.flops import forward_flops_per_token, train_flops_per_token, vision_flops
from perilune.shapes.tensors import checkpoint_tensors

IMAGE_SIDE = 72
"""Patches along a side of the image whose cost is told: 1008 pixels with the published patch size."""


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    """What `perilune inspect` looks at.

    Attributes:
        preset: a named model, e.g. nano, k3.
        config: instead of a preset, a TOML file with a [model] table, e.g. a run's config.toml, or a published config.json.
        model: instead of a preset, a run (name or folder) or the folder of a published checkpoint.
        seq_len: window for the FLOPs of attention.
        tensors: list every tensor of the published checkpoint form.
        json: one JSON object on stdout.
    """

    preset: str = "nano"
    config: Path | None = None
    model: str | None = None
    seq_len: int = 4096
    tensors: bool = False
    json: bool = False


def module_parameters(cfg: ModelConfig) -> int:
    """Count parameters and router biases from the modules themselves, built without storage on the meta device.

    Vision tower and projector count too, so the number is that of `ParameterCount.total`.
    """
    import torch

    from perilune.model import Transformer

    with torch.device("meta"):
        model = Transformer(cfg)
    biases = sum(layer.router.bias.numel() for layer in model.moe_layers())
    return sum(p.numel() for p in model.parameters()) + biases


def describe(cfg: ModelConfig, *, seq_len: int, tensors: bool) -> dict[str, Any]:
    """Everything the verb prints, as one dictionary (keys: design §4).

    Raises:
        ConfigError: `tensors` is asked for a model that no published family describes.
    """
    count = count_parameters(cfg)
    counted = module_parameters(cfg)
    assert counted == count.total, f"modules hold {counted:,} parameters, the shape table says {count.total:,}"
    facts: dict[str, Any] = {
        "total_params": count.total,
        "text_params": count.text,
        "active_params": count.active,
        "vision_params": count.vision,
        "kda_layers": sum(kind in ("kda", "gdn") for kind in cfg.layer_mixers),
        "mla_layers": cfg.layer_mixers.count("mla"),
        "state_bytes_per_sequence": recurrent_bytes(cfg),
        "cache_bytes_per_token": cache_bytes_per_token(cfg),
        "forward_flops_per_token": forward_flops_per_token(cfg, seq_len),
        "train_flops_per_token": train_flops_per_token(cfg, seq_len),
        "flops_seq_len": seq_len,
    }
    if cfg.vision is not None:
        grid = (1, IMAGE_SIDE, IMAGE_SIDE)
        facts["image_grid"] = list(grid)
        facts["image_tokens"] = (IMAGE_SIDE // cfg.vision.merge) ** 2
        facts["forward_flops_per_image"] = vision_flops(cfg.vision, cfg.hidden_size, grid)
    try:
        specs = list(checkpoint_tensors(cfg))
    except ConfigError:
        if tensors:
            raise
        specs = []  # an ablation shape: it has no published form
    if specs:
        facts["checkpoint_tensors"] = len(specs)
        facts["checkpoint_bytes"] = sum(spec.nbytes for spec in specs)
    if tensors:
        facts["count"] = len(specs)
        facts["total_bytes"] = facts["checkpoint_bytes"]
        facts["tensors"] = [
            {"name": s.name, "shape": list(s.shape), "dtype": s.dtype, "bytes": s.nbytes} for s in specs
        ]
    return facts


def _model(flags: InspectFlags) -> tuple[ModelConfig, str]:
    """The model that the flags name, and its name."""
    if flags.config is not None and flags.model is not None:
        raise ConfigError("--config and --model exclude each other: give one of them")
    path = flags.config
    if flags.model is not None:
        folder = Path(flags.model)
        files = [RunDir.resolve(flags.model).path / "config.toml", folder / "config.toml", folder / "config.json"]
        path = next((file for file in files if file.is_file()), None)
        if path is None:
            raise ConfigError(f"--model {flags.model} has neither a config.toml (a run) nor a config.json (published)")
    if path is None:
        return preset(flags.preset), flags.preset
    if path.suffix == ".json":
        return load_config(path).model, str(path)
    table = load_toml(path)
    return from_dict(ModelConfig, table.get("model", table), "model."), str(path)


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(InspectFlags, args, InspectFlags(), prog="perilune inspect", description=__doc__ or "")
    cfg, name = _model(flags)
    if flags.seq_len < 1:
        raise ConfigError(f"--seq-len {flags.seq_len} must be at least 1")
    facts = describe(cfg, seq_len=flags.seq_len, tensors=flags.tensors)
    if flags.json:
        print(json.dumps(facts))
        return 0
    _print(name, cfg, facts)
    return 0


def _print(name: str, cfg: ModelConfig, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{name}: {cfg.num_layers} layers of width {cfg.hidden_size}", show_header=False, title_justify="left"
    )
    table.add_row("parameters", f"{facts['total_params']:,}  (counted from the modules, equal to the shape table)")
    table.add_row("  text", f"{facts['text_params']:,}")
    if facts["vision_params"]:
        table.add_row("  vision tower", f"{facts['vision_params']:,}")
    table.add_row("active a token", f"{facts['active_params']:,}  (without input embedding and vision)")
    table.add_row("layers", f"{facts['kda_layers']} recurrent + {facts['mla_layers']} MLA; pattern {_pattern(cfg)}")
    table.add_row("recurrent state a sequence", f"{facts['state_bytes_per_sequence']:,} bytes, any length")
    table.add_row("cache a token", f"{facts['cache_bytes_per_token']:,} bytes")
    table.add_row(f"forward FLOPs a token at {facts['flops_seq_len']}", f"{facts['forward_flops_per_token']:.4g}")
    if "image_tokens" in facts:
        pixels = IMAGE_SIDE * cfg.vision.patch_size
        table.add_row(
            f"image of {pixels} x {pixels}",
            f"{facts['image_tokens']:,} tokens, {facts['forward_flops_per_image']:.4g} forward FLOPs",
        )
    if "checkpoint_bytes" in facts:
        table.add_row(
            "published checkpoint form", f"{facts['checkpoint_tensors']:,} tensors, {facts['checkpoint_bytes']:,} bytes"
        )
    console.print(table)
    for tensor in facts.get("tensors", []):
        print(f"{tensor['dtype']:<5} {tensor['bytes']:>16,}  {tensor['name']}  {tensor['shape']}")


def _pattern(cfg: ModelConfig) -> str:
    """Mixers in order, runs shortened: `3 kda, mla, …`."""
    runs: list[tuple[str, int]] = []
    for kind in cfg.layer_mixers:
        runs = [*runs[:-1], (kind, runs[-1][1] + 1)] if runs and runs[-1][0] == kind else [*runs, (kind, 1)]
    words = [kind if n == 1 else f"{n} {kind}" for kind, n in runs]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "…", *words[-2:]])
