"""Ablation plans: every value is applied, FLOPs are matched, and K3's forms lead from k2_nano to nano."""

from dataclasses import replace

import pytest

from perilune.config.presets import k2_nano, nano, training
from perilune.errors import ConfigError
from perilune.eval.factors import FACTORS, K3_FORM, apply, mean_train_flops, plan, values_of
from perilune.shapes.flops import forward_flops_per_token, read_sources


@pytest.mark.parametrize("preset", ["nano", "k2_nano", "tiny"])
@pytest.mark.parametrize("factor", [*FACTORS, "optimizer"])
def test_every_value_applies_to_every_trainable_preset(preset, factor):
    base = training(preset)
    seen = {apply(base, factor, value) for value in values_of(factor)}
    assert len(seen) == len(values_of(factor))


def test_k3_forms_turn_the_k2_baseline_into_nano():
    cfg = training("k2_nano")
    for factor in ("residual", "ffn", "mixer"):
        cfg = apply(cfg, factor, K3_FORM[factor])
    assert cfg.model == nano()


def test_k2_nano_and_nano_cost_nearly_the_same():
    ratio = forward_flops_per_token(k2_nano(), 256) / forward_flops_per_token(nano(), 256)
    assert 0.85 < ratio < 1.15


def test_variants_spend_the_same_flops():
    base = replace(training("nano"), steps=400)
    budget = mean_train_flops(base) * 400
    for variant in plan(base, [("residual", ("plain", "full_sublayer", "block")), ("mixer", ("kda", "softmax"))]):
        assert abs(mean_train_flops(variant.config) * variant.config.steps / budget - 1) < 0.005


def test_switches_are_tried_alone_and_together():
    labels = [v.label for v in plan(training("k2_nano"), [("residual", ()), ("ffn", ()), ("mixer", ())])]
    assert labels == ["base", "residual=block", "ffn=latent_moe", "mixer=kda", "all of them"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply(training("nano"), "depth", "2"), "unknown factor 'depth'"),
        (lambda: apply(training("nano"), "residual", "dense"), "allowed: plain, full"),
        (lambda: plan(training("nano"), []), "nothing to vary"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_read_sources_by_hand():
    # nano: 4 layers, blocks of 2. Sites see 1,2 | 2,2 | 2,3 | 3,3 sources, the output 3.
    assert read_sources(nano()) == 1 + 2 + 2 + 2 + 2 + 3 + 3 + 3 + 3
    # every sub-layer a source: 1,2,3,…,8, then 9 at the output
    assert read_sources(replace(nano(), residual="full_sublayer")) == sum(range(1, 9)) + 9
    # whole layers: 1,2 | 2,3 | 3,4 | 4,5, the output 5
    assert read_sources(replace(nano(), residual="full")) == 1 + 2 + 2 + 3 + 3 + 4 + 4 + 5 + 5
    assert read_sources(replace(nano(), residual="plain")) == 0
