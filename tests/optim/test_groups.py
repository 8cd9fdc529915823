"""Every parameter has one treatment, and Muon's cuts cover each row once, along the heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.config import SoftmaxConfig
from perilune.config.presets import k2_nano, nano, nano_vision, tiny
from perilune.errors import ConfigError
from perilune.model.transformer import Transformer
from perilune.optim.groups import Cut, treatment

SOFTMAX = SoftmaxConfig(num_heads=2, head_dim=32)
MODELS = {
    "tiny": tiny(),
    "nano": nano(),
    "nano_vision": nano_vision(),
    "k2_nano": k2_nano(),
    "gdn": replace(tiny(), mixer="gdn"),
    "softmax": replace(tiny(), mixer="softmax", global_mixer="softmax", softmax=SOFTMAX),
    "full query": replace(tiny(), mla=replace(tiny().mla, q_lora_rank=None)),
    "low-rank gate": replace(tiny(), kda=replace(tiny().kda, output_gate_rank=8, value_head_dim=8)),
}


def shapes(cfg) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(cfg).named_parameters()}


@pytest.mark.parametrize("optimizer", ["muon", "muon_whole", "adamw"])
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_has_a_treatment_and_cuts_cover_each_row_once(model, optimizer):
    for name, shape in shapes(MODELS[model]).items():
        found = treatment(name, shape, MODELS[model], optimizer)
        assert found.reason
        assert (found.rule == "muon") == bool(found.cuts)
        if not found.cuts:
            continue
        rows = torch.zeros(torch.Size(shape[:-1]).numel(), dtype=torch.int64)
        for cut in found.cuts:
            rows[cut.start : cut.stop].view(cut.count, cut.stride)[:, cut.offset : cut.offset + cut.rows] += 1
        assert rows.eq(1).all(), name


def test_heads_are_cut_where_the_layer_cuts_them():
    cfg = MODELS["low-rank gate"]  # 2 heads, K 16, V 8
    assert treatment("layers.0.mixer.qkv_proj.weight", (80, 64), cfg).cuts == (
        Cut(0, 64, 16, 0, 16),
        Cut(64, 80, 8, 0, 8),
    )
    assert treatment("layers.0.mixer.f_b_proj.weight", (32, 16), cfg).cuts == (Cut(0, 32, 16, 0, 16),)
    assert treatment("layers.0.mixer.g_b_proj.weight", (16, 8), cfg).cuts == (Cut(0, 16, 8, 0, 8),)
    assert treatment("layers.3.mixer.kv_b_proj.weight", (64, 32), cfg).cuts == (
        Cut(0, 64, 32, 0, 16),
        Cut(0, 64, 32, 16, 16),
    )
    assert treatment("layers.3.mixer.q_b_proj.weight", (48, 32), cfg).cuts == (Cut(0, 48, 24, 0, 24),)
    assert treatment("layers.1.ffn.experts.w1", (8, 32, 32), cfg).cuts == (Cut(0, 256, 32, 0, 32),)


def test_the_vision_tower_follows_the_same_rules():
    cfg = nano_vision()
    found = {
        name: treatment(name, shape, cfg) for name, shape in shapes(cfg).items() if name.startswith(("vision", "mm_"))
    }
    block = "vision_tower.encoder.blocks.0."
    assert found[block + "wqkv.weight"].cuts == (Cut(0, 192, 16, 0, 16),)
    assert treatment(block + "wqkv.weight", (192, 64), cfg, "muon_whole").cuts == (Cut(0, 192, 64, 0, 64),)
    whole = {name for name, t in found.items() if t.rule == "muon" and len(t.cuts) == 1 and t.cuts[0].count == 1}
    assert {name.removeprefix(block) for name in whole if name.startswith(block)} == {
        "wo.weight", "mlp.fc0.weight", "mlp.fc1.weight"
    }  # fmt: skip
    assert {"mm_projector.proj.0.weight", "mm_projector.proj.2.weight"} < whole
    decayed = {name.split(".")[-2] for name, t in found.items() if t.rule == "adamw" and t.decay}
    assert decayed == {"proj", "pos_emb"}
    assert {t.rule for name in found for t in [treatment(name, shapes(cfg)[name], cfg, "adamw")]} == {"adamw"}
    with pytest.raises(ConfigError, match=r"no optimizer rule for the parameter vision_tower\.new\.weight"):
        treatment("vision_tower.new.weight", (4, 4), cfg)


def test_whole_matrix_muon_keeps_q_k_and_v_apart_but_not_the_heads():
    cfg = MODELS["low-rank gate"]
    assert treatment("layers.0.mixer.qkv_proj.weight", (80, 64), cfg, "muon_whole").cuts == (
        Cut(0, 32, 32, 0, 32),
        Cut(32, 64, 32, 0, 32),
        Cut(64, 80, 16, 0, 16),
    )
    assert treatment("layers.3.mixer.kv_b_proj.weight", (64, 32), cfg, "muon_whole").cuts == (Cut(0, 64, 64, 0, 64),)


def test_vectors_never_decay_and_tables_stay_with_adamw():
    for name, shape in shapes(tiny()).items():
        found = treatment(name, shape, tiny())
        if len(shape) == 1 or "conv" in name:
            assert (found.rule, found.decay) == ("adamw", False), name
        if name.split(".")[-2] in ("embed", "lm_head", "router", "b_proj"):
            assert (found.rule, found.decay) == ("adamw", True), name


def test_t44_a_single_row_or_column_goes_to_adamw():
    assert treatment("layers.1.ffn.down_proj.weight", (1, 64), tiny()).rule == "adamw"
    assert treatment("layers.1.ffn.down_proj.weight", (64, 1), tiny()).rule == "adamw"
    assert treatment("layers.1.ffn.experts.w1", (8, 1, 32), tiny()).rule == "adamw"


def test_an_unknown_matrix_or_optimizer_is_an_error():
    with pytest.raises(ConfigError, match=r"no optimizer rule for the parameter layers\.0\.new\.weight"):
        treatment("layers.0.new.weight", (4, 4), tiny())
    with pytest.raises(ConfigError, match="allowed: muon, muon_whole, adamw"):
        treatment("norm.weight", (4,), tiny(), "sgd")
