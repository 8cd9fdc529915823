"""What an ablation can vary, and how the variants are made comparable.

A factor has named values; each value turns a training config into another one. All variants of a comparison spend the
same training FLOPs as the base: their number of steps follows from their FLOPs a token, so a cheaper model sees more
text. Batch, curriculum fractions, data order and seeds are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perilune.config import ModelConfig, SoftmaxConfig, TrainConfig
from perilune.config.presets import nano
from perilune.errors import ConfigError
from perilune.shapes.flops import train_flops_per_token

ROPE_THETA = 10000.0

Change = Callable[[ModelConfig], ModelConfig]


def _mixer(kind: str) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        donor = nano()
        kda = cfg.kda or replace(donor.kda, num_heads=max(1, cfg.hidden_size // donor.kda.head_dim))
        mla = cfg.mla or donor.mla
        if kind in ("kda", "gdn"):
            gated = replace(mla, rope_theta=None, output_gate=True)
            return replace(cfg, mixer=kind, global_mixer="mla", kda=kda, mla=gated)
        if kind == "mla":
            return replace(
                cfg, mixer="mla", global_mixer="mla", mla=replace(mla, rope_theta=ROPE_THETA, output_gate=False)
            )
        heads = SoftmaxConfig(num_heads=mla.num_heads, head_dim=mla.v_head_dim, rope_theta=ROPE_THETA)
        return replace(cfg, mixer="softmax", global_mixer="softmax", softmax=heads)

    return change


def _residual(kind: str) -> Change:
    return lambda cfg: replace(
        cfg, residual=kind, attn_res_block_layers=min(cfg.attn_res_block_layers, nano().attn_res_block_layers)
    )


def _ffn(kind: str) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        if cfg.moe is None:
            raise ConfigError("the factor ffn varies experts, but this model has none")
        if kind == "latent_moe":
            latent = cfg.moe.latent_size or cfg.hidden_size // 2
            k = min(
                2 * cfg.moe.experts_per_token if cfg.moe.latent_size is None else cfg.moe.experts_per_token,
                cfg.moe.num_experts - 1,
            )
            moe = replace(cfg.moe, latent_size=latent, latent_norm=True, balancer="quantile", experts_per_token=k)
            return replace(cfg, activation="situ", moe=moe)
        k = max(1, cfg.moe.experts_per_token // 2) if cfg.moe.latent_size is not None else cfg.moe.experts_per_token
        moe = replace(cfg.moe, latent_size=None, latent_norm=False, balancer="sign", experts_per_token=k)
        return replace(cfg, activation="swiglu", moe=moe)

    return change


def _moe_field(name: str, value: object) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        if cfg.moe is None:
            raise ConfigError(f"the factor {name} varies experts, but this model has none")
        return replace(cfg, moe=replace(cfg.moe, **{name: value}))

    return change


def _latent(on: bool) -> Change:
    def change(cfg: ModelConfig) -> ModelConfig:
        size = (cfg.moe.latent_size or cfg.hidden_size // 2) if on else None
        return _moe_field("latent_size", size)(cfg)

    return change


# factor -> value -> change of the model. The optimizer is varied too; it is not part of the model (see `apply`).
FACTORS: dict[str, dict[str, Change]] = {
    "residual": {kind: _residual(kind) for kind in ("plain", "full", "full_sublayer", "block")},
    "mixer": {kind: _mixer(kind) for kind in ("kda", "gdn", "mla", "softmax")},
    "ffn": {kind: _ffn(kind) for kind in ("latent_moe", "moe")},
    "balancer": {kind: _moe_field("balancer", kind) for kind in ("quantile", "quantile_exact", "dual", "sign", "none")},
    "activation": {kind: (lambda k: lambda cfg: replace(cfg, activation=k))(kind) for kind in ("situ", "swiglu")},
    "latent": {"on": _latent(True), "off": _latent(False)},
}
OPTIMIZERS = ("muon", "muon_whole", "adamw")
K3_FORM = {"residual": "block", "mixer": "kda", "ffn": "latent_moe", "balancer": "quantile", "activation": "situ",
           "latent": "on", "optimizer": "muon"}  # fmt: skip


def values_of(factor: str) -> tuple[str, ...]:
    """Values of a factor.

    Raises:
        ConfigError: unknown factor.
    """
    if factor == "optimizer":
        return OPTIMIZERS
    if factor not in FACTORS:
        raise ConfigError(f"unknown factor {factor!r}; allowed: {', '.join([*FACTORS, 'optimizer'])}")
    return tuple(FACTORS[factor])


def apply(cfg: TrainConfig, factor: str, value: str) -> TrainConfig:
    """Return `cfg` with one factor set.

    Raises:
        ConfigError: unknown factor or value.
    """
    allowed = values_of(factor)
    if value not in allowed:
        raise ConfigError(f"unknown value {value!r} of the factor {factor}; allowed: {', '.join(allowed)}")
    if factor == "optimizer":
        return replace(cfg, optim=replace(cfg.optim, name=value))
    return replace(cfg, model=FACTORS[factor][value](cfg.model))


def mean_train_flops(cfg: TrainConfig) -> float:
    """Training FLOPs a token, averaged over the curriculum."""
    return sum(stage.fraction * train_flops_per_token(cfg.model, stage.seq_len) for stage in cfg.stages)


@dataclass(frozen=True)
class Variant:
    """One cell of the comparison: a label such as `residual=block`, and the run that measures it (any seed)."""

    label: str
    config: TrainConfig


def plan(base: TrainConfig, vary: Sequence[tuple[str, tuple[str, ...]]]) -> list[Variant]:
    """Variants of an ablation, the first one being the point of comparison.

    Args:
        base: run whose FLOPs all variants spend.
        vary: factors with the values to compare. A factor without values is set to K3's form, one at a time, beside the
            unchanged base and a variant with all of them at once.

    Raises:
        ConfigError: unknown factor or value, or nothing to vary.
    """
    if not vary:
        raise ConfigError("nothing to vary; give e.g. --vary residual=plain,full,block")
    budget = mean_train_flops(base) * base.steps

    def matched(label: str, cfg: TrainConfig) -> Variant:
        return Variant(label, replace(cfg, steps=max(1, round(budget / mean_train_flops(cfg)))))

    listed = [(factor, values) for factor, values in vary if values]
    switched = [factor for factor, values in vary if not values]
    variants = [
        matched(f"{factor}={value}", apply(base, factor, value)) for factor, values in listed for value in values
    ]
    if switched:
        variants.append(matched("base", base))
        everything = base
        for factor in switched:
            variants.append(matched(f"{factor}={K3_FORM[factor]}", apply(base, factor, K3_FORM[factor])))
            everything = apply(everything, factor, K3_FORM[factor])
        if len(switched) > 1:
            variants.append(matched("all of them", everything))
    return variants
