"""What an export of Kimi K3 is made of, against a list typed from the released checkpoint."""

import functools
import json
import re
import struct

import pytest
from published_folders import K3, LINEAR, write_folder, write_run

from perilune.config.presets import k3, kimi_linear_48b
from perilune.loading import convert
from perilune.shapes.tensors import checkpoint_tensors

# D width, P key width, L latent, E experts, F expert size, S shared size, Z vocabulary, C dense size, X A_log entries.
KDA = """self_attn.q_proj.weight P,D | self_attn.k_proj.weight P,D | self_attn.v_proj.weight P,D | self_attn.g_proj.weight P,D
self_attn.o_proj.weight D,P | self_attn.b_proj.weight H,D | self_attn.f_a_proj.weight K,D | self_attn.f_b_proj.weight P,K
self_attn.q_conv1d.weight P,1,4 F32 | self_attn.k_conv1d.weight P,1,4 F32 | self_attn.v_conv1d.weight P,1,4 F32
self_attn.A_log X F32 | self_attn.dt_bias P F32 | self_attn.o_norm.weight K F32"""
MLA = """self_attn.q_a_proj.weight Q,D | self_attn.q_a_layernorm.weight Q | self_attn.q_b_proj.weight A*(n+r),Q
self_attn.kv_a_proj_with_mqa.weight c+r,D | self_attn.kv_a_layernorm.weight c | self_attn.kv_b_proj.weight A*(n+v),c
self_attn.g_proj.weight A*v,D | self_attn.o_proj.weight D,A*v"""
EVERY = """input_layernorm.weight D | post_attention_layernorm.weight D | self_attention_res_norm.weight D
self_attention_res_proj.weight 1,D | mlp_res_norm.weight D | mlp_res_proj.weight 1,D"""
DENSE = "mlp.gate_proj.weight C,D | mlp.up_proj.weight C,D | mlp.down_proj.weight D,C"
MOE = """block_sparse_moe.gate.weight E,D | block_sparse_moe.gate.e_score_correction_bias E F32
block_sparse_moe.routed_expert_down_proj.weight L,D | block_sparse_moe.routed_expert_norm.weight L
block_sparse_moe.routed_expert_up_proj.weight D,L | block_sparse_moe.shared_experts.gate_proj.weight S,D
block_sparse_moe.shared_experts.up_proj.weight S,D | block_sparse_moe.shared_experts.down_proj.weight D,S"""
EXPERT = """block_sparse_moe.experts.{e}.w1.weight_packed F,L//2 U8 | block_sparse_moe.experts.{e}.w1.weight_scale F,L//32 U8
block_sparse_moe.experts.{e}.w3.weight_packed F,L//2 U8 | block_sparse_moe.experts.{e}.w3.weight_scale F,L//32 U8
block_sparse_moe.experts.{e}.w2.weight_packed L,F//2 U8 | block_sparse_moe.experts.{e}.w2.weight_scale L,F//32 U8"""
TOP = """language_model.model.embed_tokens.weight Z,D | language_model.lm_head.weight Z,D | language_model.model.norm.weight D
language_model.model.output_attn_res_norm.weight D | language_model.model.output_attn_res_proj.weight 1,D"""
TOWER = """vision_tower.patch_embed.proj.weight v,3,p,p | vision_tower.patch_embed.pos_emb.weight g,g,v
vision_tower.encoder.final_layernorm.weight v | mm_projector.proj.0.weight 4*v,4*v | mm_projector.proj.2.weight D,4*v
mm_projector.post_norm.weight D"""
VIT_BLOCK = """vision_tower.encoder.blocks.{b}.norm0.weight v | vision_tower.encoder.blocks.{b}.norm1.weight v
vision_tower.encoder.blocks.{b}.wqkv.weight 3*w,v | vision_tower.encoder.blocks.{b}.wo.weight v,w
vision_tower.encoder.blocks.{b}.mlp.fc0.weight m,v | vision_tower.encoder.blocks.{b}.mlp.fc1.weight v,m"""


def typed(text, numbers, prefix="", **names):
    parsed = parse(text, tuple(numbers.items()))
    return {prefix + name.format(**names): told for name, told in parsed.items()}


@functools.cache
def parse(text, numbers):
    rows = {}
    for row in re.split(r"\||\n", text):
        name, shape, *dtype = row.split()
        sizes = tuple(eval(part, {}, dict(numbers)) for part in shape.split(","))
        rows[name] = (sizes, dtype[0] if dtype else "BF16")
    return rows


def released(cfg):
    """The list of §2 for the sizes of `cfg`."""
    kda, mla, moe, vision = cfg.kda, cfg.mla, cfg.moe, cfg.vision
    n = {
        "D": cfg.hidden_size, "H": kda.num_heads, "K": kda.head_dim, "P": kda.num_heads * kda.head_dim, "X": kda.stored_heads, "Z": cfg.vocab_size,
        "C": cfg.dense_size, "L": moe.latent_size, "E": moe.num_experts, "F": moe.expert_size, "S": moe.num_shared_experts * moe.expert_size,
        "A": mla.num_heads, "Q": mla.q_lora_rank, "c": mla.kv_lora_rank, "n": mla.qk_nope_head_dim, "r": mla.qk_rope_head_dim, "v": mla.v_head_dim,
    }  # fmt: skip
    rows = typed(TOP, n)
    for layer in range(cfg.num_layers):
        at = f"language_model.model.layers.{layer}."
        full = (layer + 1) % 4 == 0 or layer == cfg.num_layers - 1
        rows |= typed(MLA if full else KDA, n, at) | typed(EVERY, n, at) | typed(MOE if layer else DENSE, n, at)
        for expert in range(moe.num_experts if layer else 0):
            rows |= typed(EXPERT, n, at, e=expert)
    n |= {"v": vision.hidden_size, "p": vision.patch_size, "g": vision.position_grid, "m": vision.mlp_size,
              "w": vision.num_heads * vision.head_dim}  # fmt: skip
    rows |= typed(TOWER, n)
    for block in range(vision.num_layers):
        rows |= typed(VIT_BLOCK, n, b=block)
    return rows


def header(path):
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


def written(folder):
    rows = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, told in header(path).items():
            if name != "__metadata__":
                assert name not in rows
                rows[name] = (tuple(told["shape"]), told["dtype"])
                size = {"F32": 4, "BF16": 2, "U8": 1}[told["dtype"]]
                assert told["data_offsets"][0] % size == 0, "readers map tensors in place"
    return rows


def test_the_table_of_k3_is_the_released_one():
    rows = released(k3())
    assert len(rows) == 497_220
    assert {spec.name: (spec.shape, spec.dtype) for spec in checkpoint_tensors(k3())} == rows


def test_an_export_of_a_small_k3_has_exactly_these_tensors_in_the_released_files(tmp_path):
    write_folder(tmp_path / "in", K3)
    convert(tmp_path / "in", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "out", experts="mxfp4")
    assert written(tmp_path / "out") == released(K3)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-00008.safetensors" for n in range(1, 9)], "5 layers, the rest, projector, tower"
    for number in range(5):
        names = header(tmp_path / "out" / files[number])
        assert all(f".layers.{number}." in name for name in names if name != "__metadata__")
    tail, projector, tower = (header(tmp_path / "out" / file) for file in files[5:])
    assert set(tail) == {"__metadata__", *typed(TOP, dict.fromkeys("ZD", 1))}
    assert all(name.startswith(("mm_projector.", "__")) for name in projector)
    assert all(name.startswith(("vision_tower.", "__")) for name in tower)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in checkpoint_tensors(K3))
    assert index["weight_map"].keys() == released(K3).keys()


def test_kimi_linear_names_that_differ():
    rows = {spec.name: (spec.shape, spec.dtype) for spec in checkpoint_tensors(kimi_linear_48b())}
    at = "model.layers.1."
    assert rows[at + "self_attn.A_log"] == ((1, 1, 32, 1), "F32")
    assert rows[at + "self_attn.g_a_proj.weight"] == ((128, 2304), "BF16")
    assert rows[at + "self_attn.g_b_proj.weight"] == ((4096, 128), "BF16")
    assert rows[at + "self_attn.dt_bias"] == ((4096,), "F32")
    assert rows[at + "self_attn.q_conv1d.weight"] == ((4096, 1, 4), "F32")
    assert rows["model.layers.3.self_attn.q_proj.weight"] == ((6144, 2304), "BF16")
    assert rows[at + "block_sparse_moe.experts.255.w2.weight"] == ((2304, 1024), "BF16")
    assert rows[at + "block_sparse_moe.shared_experts.down_proj.weight"] == ((2304, 1024), "BF16")
    assert rows["model.layers.0.mlp.gate_proj.weight"] == ((9216, 2304), "BF16")
    assert rows["lm_head.weight"] == ((163840, 2304), "BF16")
    odd = (
        "language_model",
        "_res_",
        "routed_expert_",
        "layers.3.self_attn.g_proj",
        "layers.1.self_attn.g_proj.",
        "q_a_proj",
    )
    assert not [name for name in rows if any(part in name for part in odd)]


@pytest.mark.parametrize("cfg", [LINEAR])
def test_an_export_of_a_run_has_the_table_of_its_family(tmp_path, cfg):
    write_run(tmp_path / "run", cfg)
    convert(tmp_path / "run", tmp_path / "out")
    assert written(tmp_path / "out") == {s.name: (s.shape, s.dtype) for s in checkpoint_tensors(cfg)}
