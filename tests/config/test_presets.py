"""Presets keep their sizes (golden), their promises, and refuse nonsense."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.config import KDAConfig, StageConfig, TrainConfig
from perilune.config.presets import PRESETS, TRAINABLE, k3, nano, preset, tiny, training
from perilune.errors import ConfigError
from perilune.shapes.counts import count_parameters

GOLDEN = Path(__file__).parents[1] / "golden" / "presets.json"


def counts():
    return {name: [count_parameters(f()).total, count_parameters(f()).active] for name, f in PRESETS.items()}


def test_counts_are_the_recorded_ones():
    assert counts() == json.loads(GOLDEN.read_text())


def test_promised_sizes():
    total = {name: n for name, (n, _) in counts().items()}
    assert 0.15e6 < total["tiny"] < 0.3e6
    assert 0.08e9 < total["small"] < 0.12e9
    assert 1.3e9 < total["mini"] < 1.5e9
    assert 8e9 < total["mid"] < 12e9


@pytest.mark.parametrize("name", TRAINABLE)
def test_training_presets_hold_together(name):
    assert training(name).model == preset(name)


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'nano'"):
        preset("nanno")
    with pytest.raises(ConfigError, match="not for training"):
        training("k3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: replace(tiny(), attn_res_block_layers=0), "attn_res_block_layers=0"),
        (lambda: replace(tiny(), num_layers=0), "num_layers=0"),
        (lambda: replace(tiny().moe, experts_per_token=8), "must be below moe.num_experts=8"),
        (lambda: replace(tiny().moe, experts_per_token=9), "must be below"),
        (lambda: replace(tiny(), mixer="mamba"), "allowed: kda, gdn, mla, softmax"),
        (lambda: replace(tiny(), mixer="softmax"), "model.softmax is not set"),
        (lambda: replace(tiny(), moe=None), "model.moe is not set"),
        (lambda: replace(tiny(), dense_layers=5), "dense_layers=5"),
        (lambda: KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=-6.0), r"\[-5, 0\)"),
        (lambda: KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=0.0), r"\[-5, 0\)"),
        (lambda: KDAConfig(num_heads=4, head_dim=16, stored_heads=2), "stored_heads=2"),
        (lambda: replace(tiny().mla, rope_theta=1e4, qk_rope_head_dim=7), "must be even"),
        (lambda: replace(training("tiny"), stages=(StageConfig(seq_len=100),)), "nearest: 500, 600"),
        (lambda: replace(training("tiny"), stages=()), "stages is empty"),
        (lambda: replace(training("tiny"), stages=(StageConfig(seq_len=64, fraction=0.5),)), "sum to 0.5"),
        (lambda: replace(training("tiny"), precision="fp8"), "allowed: auto, fp32, bf16"),
        (lambda: replace(training("tiny").optim, name="sgd"), "allowed: muon"),
        (lambda: replace(training("tiny").data, synthetic=("chess",)), "unknown tasks"),
    ],
)
def test_impossible_settings_are_refused_with_the_values(change, message):
    with pytest.raises(ConfigError, match=message):
        change()


def test_k3_pattern_and_nano_context():
    assert k3().layer_mixers[-2:] == ("mla", "mla") and k3().layer_ffns.count("dense") == 1
    assert nano().mla.rope_theta is None  # no positions: any context length


def test_configs_are_frozen_and_hashable():
    assert len({training("tiny"), training("tiny")}) == 1
    with pytest.raises(AttributeError):
        training("tiny").steps = 3  # type: ignore[misc]
    assert isinstance(training("tiny"), TrainConfig)
