"""The FLOPs of vision against torch's own count of the products that the modules run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perilune.config import VisionConfig
from perilune.config.presets import k3
from perilune.model.vision import Projector, VisionTower
from perilune.ops.choice import force
from perilune.shapes.flops import vision_flops

VISION = VisionConfig(
    hidden_size=24, num_layers=2, num_heads=2, head_dim=16, mlp_size=40, patch_size=4, position_grid=6
)


@pytest.mark.parametrize("grid", [(1, 4, 6), (3, 2, 4)])
def test_vision_equals_the_counted_products(grid):
    tower, projector = VisionTower(VISION), Projector(VISION, 20)
    patches, grids = torch.zeros(grid[0] * grid[1] * grid[2], 3, 4, 4), torch.tensor([grid])
    with torch.no_grad():
        for parameter in (*tower.parameters(), *projector.parameters()):
            parameter.zero_()
        with force("reference"), FlopCounterMode(display=False) as counter:  # one product for scores, one for values
            projector(tower(patches, grids), grids)
    assert vision_flops(VISION, 20, grid) == counter.get_total_flops()


def test_published_tower_spends_most_on_its_weights():
    cfg = k3()
    flops = vision_flops(cfg.vision, cfg.hidden_size, (1, 72, 72))
    weights = 2 * (401_214_464 * 72**2 + 46_144_512 * 36**2)  # norms and the table of positions are not multiplied
    attention = 27 * 4 * 1536 * (72**2) ** 2
    assert flops == pytest.approx(weights + attention, rel=0.01)
