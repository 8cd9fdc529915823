"""Published checkpoint folders of random weights, written by the safetensors library, and runs to export."""

import json
from dataclasses import replace

import torch
from models import random_model
from safetensors.torch import save_file

from perilune import checkpoint
from perilune.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, TrainConfig, VisionConfig
from perilune.config.presets import tiny
from perilune.config.published import publish, to_json
from perilune.rundir import RunDir
from perilune.shapes.tensors import checkpoint_tensors
from perilune.tokenizer.byte import ByteTokenizer

VISION = VisionConfig(
    hidden_size=16, num_layers=2, num_heads=2, head_dim=12, mlp_size=24, patch_size=2, position_grid=3
)
K3 = replace(tiny(), num_layers=5, kda=replace(tiny().kda, stored_heads=5), vision=VISION)
LINEAR = ModelConfig(
    vocab_size=320, hidden_size=48, num_layers=5, residual="plain", activation="swiglu", dense_size=80,
    kda=KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=None, output_gate_rank=16),
    mla=MLAConfig(num_heads=2, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, output_gate=False),
    moe=MoEConfig(num_experts=8, experts_per_token=3, num_shared_experts=1, expert_size=24, latent_norm=False,
                  routed_scaling_factor=2.446, balancer="sign"),
)  # fmt: skip


def random_tensors(cfg, packed, seed=0):
    """Every tensor of the table: codes are any bytes, scales any that are not NaN, the rest small numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in checkpoint_tensors(cfg, packed_experts=packed):
        if spec.name.endswith("weight_packed"):
            value = torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8)
            value[0] &= 0x88  # blocks of zeros of both signs
            value[1] &= 0x99  # blocks whose codes are small
        elif spec.name.endswith("weight_scale"):
            value = torch.randint(117, 125, spec.shape, generator=generator, dtype=torch.uint8)
        else:
            value = torch.empty(spec.shape).normal_(0, 0.1, generator=generator)
            if spec.name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
                value += 1
            value = value.to(torch.float32 if spec.dtype == "F32" else torch.bfloat16)
        tensors[spec.name] = value
    return tensors


def write_folder(folder, cfg, *, packed=None, tensors=None, shards=3, tokenizer=True):
    """A published folder in a few shards; returns the tensors."""
    packed = cfg.residual == "block" if packed is None else packed
    tensors = random_tensors(cfg, packed) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    published = publish(cfg, experts="mxfp4" if packed else "bf16", bos=1, eos=2, pad=0)
    (folder / "config.json").write_text(json.dumps(to_json(published)))
    if tokenizer:
        ByteTokenizer().save(folder / "tokenizer.json")
    return tensors


def write_run(folder, cfg, seed=0, **settings):
    """A run with one checkpoint of random fp32 weights and other settings of its config; returns the model."""
    model = random_model(cfg, seed, dtype=torch.float32)
    run = RunDir(folder)
    run.create()
    run.write_config(TrainConfig(model=cfg, **settings))
    ByteTokenizer().save(run.tokenizer_path)
    checkpoint.save(run, 7, model=model.state_dict(), optimizer={}, state={})
    return model


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_all(folder):
    """Every tensor of a folder's safetensors files, read by the library."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(a, b):
    """Equal names, dtypes, shapes and bits."""
    if a.keys() != b.keys():
        return False
    return all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )  # fmt: skip
