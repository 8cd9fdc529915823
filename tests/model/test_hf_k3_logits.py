"""A Kimi K3 checkpoint on disk gives the logits of an independent fp64 model.

Nothing of the package stands between the file and the expected logits: tensors are read by the safetensors library, MXFP4 is
decoded here by the table of the format, and the names are translated by hand.
"""

import pytest
import torch
from models import random_ids
from published_folders import K3, read_all, write_folder
from straight_line import straight_line_logits

from perilune.loading import convert, load_run

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decode(packed, scale):
    low, high = E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]
    codes = torch.stack([low, high], dim=-1).flatten(-2)
    return codes * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, dim=-1)


def translated(cfg, t):
    """Published names to those of the straight-line model."""
    root = "language_model.model."
    w = {"embed.weight": t[root + "embed_tokens.weight"], "lm_head.weight": t["language_model.lm_head.weight"],
         "norm.weight": t[root + "norm.weight"], "output_read.norm": t[root + "output_attn_res_norm.weight"],
         "output_read.query": t[root + "output_attn_res_proj.weight"][0]}  # fmt: skip
    for layer in range(cfg.num_layers):
        src, dst = f"{root}layers.{layer}.", f"layers.{layer}."
        w[dst + "mixer_norm.weight"] = t[src + "input_layernorm.weight"]
        w[dst + "ffn_norm.weight"] = t[src + "post_attention_layernorm.weight"]
        for ours, theirs in (("mixer_read", "self_attention_res"), ("ffn_read", "mlp_res")):
            w[f"{dst}{ours}.norm"] = t[f"{src}{theirs}_norm.weight"]
            w[f"{dst}{ours}.query"] = t[f"{src}{theirs}_proj.weight"][0]
        a, m = src + "self_attn.", dst + "mixer."
        if a + "A_log" in t:
            w[m + "qkv_proj.weight"] = torch.cat([t[f"{a}{x}_proj.weight"] for x in "qkv"])
            w[m + "qkv_conv"] = torch.cat([t[f"{a}{x}_conv1d.weight"][:, 0] for x in "qkv"])
            w[m + "A_log"], w[m + "dt_bias"], w[m + "o_norm"] = t[a + "A_log"], t[a + "dt_bias"], t[a + "o_norm.weight"]
            for name in ("f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj"):
                w[f"{m}{name}.weight"] = t[f"{a}{name}.weight"]
        else:
            names = {"q_a_proj": "q_a_proj", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b_proj", "g_proj": "g_proj",
                     "kv_a_proj_with_mqa": "kv_a_proj", "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b_proj",
                     "o_proj": "o_proj"}  # fmt: skip
            for theirs, ours in names.items():
                w[f"{m}{ours}.weight"] = t[f"{a}{theirs}.weight"]
        f = dst + "ffn."
        if layer == 0:
            for name in ("gate_proj", "up_proj", "down_proj"):
                w[f"{f}{name}.weight"] = t[f"{src}mlp.{name}.weight"]
            continue
        b = src + "block_sparse_moe."
        w[f + "router.weight"], w[f + "router.bias"] = t[b + "gate.weight"], t[b + "gate.e_score_correction_bias"]
        w[f + "down_proj.weight"], w[f + "up_proj.weight"] = (
            t[b + "routed_expert_down_proj.weight"],
            t[b + "routed_expert_up_proj.weight"],
        )
        w[f + "norm.weight"] = t[b + "routed_expert_norm.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            w[f"{f}shared.{name}.weight"] = t[f"{b}shared_experts.{name}.weight"]
        for name in ("w1", "w2", "w3"):
            at = [f"{b}experts.{e}.{name}.weight" for e in range(cfg.moe.num_experts)]
            w[f"{f}experts.{name}"] = torch.stack([decode(t[x + "_packed"], t[x + "_scale"]) for x in at])
    return w


@pytest.mark.parametrize("form", ["published", "native"])
def test_logits_of_an_imported_checkpoint(tmp_path, form):
    write_folder(tmp_path / "in", K3)
    folder = tmp_path / "in"
    if form == "native":
        convert(folder, tmp_path / "run")
        folder = tmp_path / "run"
    loaded = load_run(folder)
    assert loaded.config.model == K3
    ids = random_ids(K3, 1, 30)
    truth = straight_line_logits(K3, translated(K3, read_all(tmp_path / "in")), ids[0])
    with torch.no_grad():
        model = loaded.model.double()
        model.compute_dtype = torch.float64
        wide = model(ids).logits_BTZ[0]
    assert truth.std() > 0.05
    assert (wide - truth).abs().max() < 1e-9 * truth.abs().max()


def test_a_wrong_name_would_show(tmp_path):
    """Gate and up of an expert, two norms of one size: swapping them moves the logits far beyond the tolerance."""
    write_folder(tmp_path / "in", K3)
    tensors = read_all(tmp_path / "in")
    ids = random_ids(K3, 1, 12)[0]
    truth = straight_line_logits(K3, translated(K3, tensors), ids)
    at = "language_model.model.layers.1."
    for a, b in (("block_sparse_moe.experts.0.w1.weight_packed", "block_sparse_moe.experts.0.w3.weight_packed"),
                 ("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
                 ("input_layernorm.weight", "post_attention_layernorm.weight")):  # fmt: skip
        swapped = tensors | {at + a: tensors[at + b], at + b: tensors[at + a]}
        other = straight_line_logits(K3, translated(K3, swapped), ids)
        assert (other - truth).abs().max() > 1e-5 * truth.abs().max()
