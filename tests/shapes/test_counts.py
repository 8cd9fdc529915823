"""Parameter and byte counts against the published totals, and against a recount after changing one width."""

from dataclasses import replace

import pytest

from perilune.config.presets import PRESETS, k3, kimi_linear_48b, tiny
from perilune.errors import ConfigError
from perilune.shapes.cache import cache_bytes_per_token, recurrent_bytes
from perilune.shapes.counts import count_parameters
from perilune.shapes.tensors import checkpoint_tensors, text_tensors


def test_k3_totals_are_the_published_ones():
    count = count_parameters(k3())
    assert count.total == 2_779_931_837_184
    assert count.text == 2_779_484_478_208
    assert count.active == 104_189_614_848
    assert count.vision == 401_214_464
    assert count.projector == 46_144_512


def test_k3_checkpoint_index():
    specs = list(checkpoint_tensors(k3()))
    assert len(specs) == 497_220
    assert sum(spec.nbytes for spec in specs) == 1_560_860_324_864
    assert sum(spec.elements for spec in specs) == count_parameters(k3()).total
    assert len({spec.name for spec in specs}) == len(specs)


def test_k3_layers_state_and_cache():
    cfg = k3()
    assert cfg.layer_mixers.count("kda") == 69 and cfg.layer_mixers.count("mla") == 24
    assert [i for i, kind in enumerate(cfg.layer_mixers) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert cfg.num_attn_res_blocks == 8
    assert recurrent_bytes(cfg) == 449_372_160
    assert cache_bytes_per_token(cfg) == 27_648
    assert cache_bytes_per_token(cfg, entry="fp8") == 13_824


def test_kimi_linear_layers():
    cfg = kimi_linear_48b()
    assert [i + 1 for i, kind in enumerate(cfg.layer_mixers) if kind == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert abs(count_parameters(cfg).total / 49.12e9 - 1) < 1e-3


@pytest.mark.parametrize("name", ["tiny", "nano", "small", "mini", "mid", "k3", "kimi_linear_48b"])
def test_count_equals_the_tensor_table(name):
    cfg = PRESETS[name]()
    assert sum(spec.elements for spec in text_tensors(cfg, packed_experts=False)) == count_parameters(cfg).text


def test_changing_one_width_changes_the_counts_by_hand_computed_amounts():
    cfg = tiny()
    wider = replace(cfg, moe=replace(cfg.moe, expert_size=cfg.moe.expert_size + 8))
    latent, width = cfg.moe.latent_size, cfg.hidden_size
    by_hand = 3 * (3 * 8 * latent * cfg.moe.num_experts + 3 * 8 * width)  # three expert layers: routed and shared
    assert count_parameters(wider).text - count_parameters(cfg).text == by_hand


def test_expert_that_cannot_be_packed_is_refused():
    cfg = tiny()
    odd = replace(cfg, moe=replace(cfg.moe, expert_size=40))
    with pytest.raises(ConfigError, match="40 columns"):
        list(text_tensors(odd, packed_experts=True))


def test_unpublished_family_is_refused():
    with pytest.raises(ConfigError, match="kimi_k3"):
        list(text_tensors(replace(tiny(), residual="plain"), packed_experts=False))
