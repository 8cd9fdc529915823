"""The modules hold exactly the parameters that the shape table counts."""

from dataclasses import replace

import pytest

from perilune.cli.inspect import module_parameters
from perilune.config import SoftmaxConfig
from perilune.config.presets import PRESETS, tiny
from perilune.shapes.counts import count_parameters


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset(name):
    cfg = PRESETS[name]()
    assert module_parameters(cfg) == count_parameters(cfg).total


@pytest.mark.parametrize(
    "change",
    [
        {"mixer": "gdn"},
        {"mixer": "mla"},
        {"mixer": "softmax", "softmax": SoftmaxConfig(num_heads=2, head_dim=16)},
        {"residual": "plain"},
        {"residual": "full_sublayer"},
        {"moe": replace(tiny().moe, latent_size=None)},
        {"moe": replace(tiny().moe, latent_norm=False, num_shared_experts=0)},
        {"kda": replace(tiny().kda, output_gate_rank=4, value_head_dim=24)},
        {"mla": replace(tiny().mla, q_lora_rank=None, output_gate=False)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part(change):
    cfg = replace(tiny(), **change)
    assert module_parameters(cfg) == count_parameters(cfg).total
