"""A random Kimi-Linear-shaped model, written under published names, loads into transformers and gives the same logits."""

import json
from dataclasses import replace

import pytest
import torch
from models import random_ids, random_model
from safetensors.torch import save_file

from perilune.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from perilune.config.presets import tiny
from perilune.errors import CheckpointError
from perilune.model import Transformer
from perilune.model.hf import kimi_linear_config, links, load_published, to_published
from perilune.shapes.tensors import text_tensors

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no kimi_linear")

CFG = ModelConfig(
    vocab_size=256, hidden_size=48, num_layers=5, residual="plain", activation="swiglu", dense_size=80,
    kda=KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=None, output_gate_rank=16),
    mla=MLAConfig(num_heads=2, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, output_gate=False),
    moe=MoEConfig(num_experts=8, experts_per_token=3, num_shared_experts=1, expert_size=24, latent_norm=False,
                  routed_scaling_factor=2.446, balancer="sign"),
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi_linear")
    ours = random_model(CFG, dtype=torch.float32)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in to_published(ours)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(kimi_linear_config(CFG)))
    theirs, info = transformers.KimiLinearForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return ours, theirs.eval()


def test_prefill(pair):
    ours, theirs = pair
    ids = random_ids(CFG, 2, 70)
    with torch.no_grad():
        a, b = ours(ids).logits_BTZ, theirs(ids, use_cache=False).logits
    assert b.std() > 0.1
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_chunked_prefill(pair):
    ours, theirs = pair
    ids = random_ids(CFG, 2, 70, seed=1)
    with torch.no_grad():
        truth = theirs(ids, use_cache=False).logits
        state = ours.new_state(2)
        parts = [ours(ids[:, a:b], state).logits_BTZ for a, b in ((0, 33), (33, 34), (34, 70))]
    torch.testing.assert_close(torch.cat(parts, 1), truth, rtol=1e-5, atol=1e-5)


def test_token_by_token(pair):
    ours, theirs = pair
    ids = random_ids(CFG, 2, 24, seed=2)
    with torch.no_grad():
        state, cache, a, b = ours.new_state(2), None, [], []
        for t in range(24):
            a.append(ours(ids[:, t : t + 1], state).logits_BTZ)
            out = theirs(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            b.append(out.logits)
    torch.testing.assert_close(torch.cat(a, 1), torch.cat(b, 1), rtol=1e-5, atol=1e-5)


def test_load_published_is_the_inverse(pair):
    ours, _ = pair
    tensors = dict(to_published(ours))
    other = Transformer(CFG)
    load_published(other, tensors)
    for name, value in ours.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="model.norm.weight"):
        load_published(other, tensors)
    tensors["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"\(3,\)"):
        load_published(other, tensors)


@pytest.mark.parametrize("cfg", [CFG, tiny(), replace(tiny(), kda=replace(tiny().kda, stored_heads=4))])
def test_links_cover_every_parameter_once(cfg):
    model = random_model(cfg, dtype=torch.float32)
    assert [link.name for link in links(cfg)] == [spec.name for spec in text_tensors(cfg, packed_experts=False)]
    covered = sum(tensor.numel() for _, tensor in to_published(model))
    biases = sum(layer.router.bias.numel() for layer in model.moe_layers())
    assert covered == sum(p.numel() for p in model.parameters()) + biases
