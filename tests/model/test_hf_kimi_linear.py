"""A random Kimi-Linear-shaped run, exported, loads into transformers and gives the same logits; and the other way round."""

import json
from dataclasses import replace

import pytest
import torch
from models import random_ids, random_model
from published_folders import LINEAR, write_run

from perilune.config.presets import tiny
from perilune.loading import convert, load_published
from perilune.model.hf import links, to_published
from perilune.shapes.tensors import text_tensors

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no kimi_linear")


def load_theirs(folder, dtype=torch.float32):
    theirs, info = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("kimi_linear")
    write_run(root / "run", LINEAR)
    convert(root / "run", root / "published", to="kimi-linear")
    return root / "published"


@pytest.fixture(scope="module")
def pair(folder):
    return load_published(folder).model, load_theirs(folder)


def test_prefill(pair):
    ours, theirs = pair
    ids = random_ids(LINEAR, 2, 70)
    with torch.no_grad():
        a, b = ours(ids).logits_BTZ, theirs(ids, use_cache=False).logits
    assert b.std() > 0.1
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_chunked_prefill(pair):
    ours, theirs = pair
    ids = random_ids(LINEAR, 2, 70, seed=1)
    with torch.no_grad():
        truth = theirs(ids, use_cache=False).logits
        state = ours.new_state(2)
        parts = [ours(ids[:, a:b], state).logits_BTZ for a, b in ((0, 33), (33, 34), (34, 70))]
    torch.testing.assert_close(torch.cat(parts, 1), truth, rtol=1e-5, atol=1e-5)


def test_token_by_token(pair):
    ours, theirs = pair
    ids = random_ids(LINEAR, 2, 24, seed=2)
    with torch.no_grad():
        state, cache, a, b = ours.new_state(2), None, [], []
        for t in range(24):
            a.append(ours(ids[:, t : t + 1], state).logits_BTZ)
            out = theirs(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            b.append(out.logits)
    torch.testing.assert_close(torch.cat(a, 1), torch.cat(b, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_what_transformers_saves_is_read(folder, tmp_path, dtype, flat):
    """Its names (the dense MLP under the experts' prefix), its types (bf16 convolutions, an fp32 router), its two schemas."""
    theirs = load_theirs(folder, dtype)
    theirs.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    if flat:
        for key in ("linear_attn_config", "mla_use_nope", "first_k_dense_replace", "moe_router_activation_func"):
            del document[key]
        (tmp_path / "config.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    ours = load_published(tmp_path)
    assert ours.config.model == LINEAR
    ids = random_ids(LINEAR, 2, 40)
    with torch.no_grad():
        a, b = ours.model(ids).logits_BTZ, theirs.float()(ids, use_cache=False).logits
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    convert(tmp_path, tmp_path / "native", verify=True)
    convert(tmp_path / "native", tmp_path / "back")
    again = load_theirs(tmp_path / "back")
    exact = dtype == torch.bfloat16  # an fp32 save is rounded to the published bf16
    with torch.no_grad():
        c = again(ids, use_cache=False).logits
    assert (not exact) or (c - b).abs().max() < 1e-3 * b.abs().max()


@pytest.mark.parametrize("cfg", [LINEAR, tiny(), replace(tiny(), kda=replace(tiny().kda, stored_heads=4))])
def test_links_cover_every_parameter_once(cfg):
    model = random_model(cfg, dtype=torch.float32)
    assert [link.name for link in links(cfg)] == [spec.name for spec in text_tensors(cfg, packed_experts=False)]
    covered = sum(tensor.numel() for _, tensor in to_published(model))
    biases = sum(layer.router.bias.numel() for layer in model.moe_layers())
    assert covered == sum(p.numel() for p in model.parameters()) + biases
