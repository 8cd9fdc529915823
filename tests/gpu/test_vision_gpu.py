"""The vision tower on a GPU: against the same on the CPU, in both dtypes, and in memory that does not grow with the square."""

from dataclasses import replace

import pytest
import torch

from perilune.config import VisionConfig
from perilune.config.presets import tiny
from perilune.model import ImageBatch, Transformer, init_weights
from perilune.ops.packed_attention import packed_attention, packed_attention_reference

VISION = VisionConfig(hidden_size=256, num_layers=3, num_heads=4, head_dim=128, mlp_size=512, position_grid=16)
GRIDS = [(1, 16, 16), (4, 8, 12), (1, 30, 22), (1, 16, 16), (2, 6, 4)]


class Item:
    def __init__(self, grid):
        self.grid = grid
        self.patches = torch.rand(grid[0] * grid[1] * grid[2], 3, 14, 14) * 2 - 1


def batch():
    items = [Item(grid) for grid in GRIDS]
    tokens = sum(h * w // 4 for _, h, w in GRIDS)
    return ImageBatch.collate(items, torch.arange(3, 3 + tokens)), tokens


@pytest.mark.parametrize("dtype, times_eps", [(torch.float32, 40), (torch.bfloat16, 4)])
def test_packed_attention_and_its_gradients(dtype, times_eps):
    lengths = [300, 77, 300, 1, 1024]
    given = [torch.randn(sum(lengths), 3, 128, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in given]
    weight = torch.randn(sum(lengths), 3, 128, dtype=torch.float64, device="cuda")
    ours = packed_attention(*given, lengths, 128**-0.5)
    truth = packed_attention_reference(*exact, lengths, 128**-0.5)
    pairs = [(ours, truth), *zip(torch.autograd.grad((ours * weight).sum(), given),
                                 torch.autograd.grad((truth * weight).sum(), exact), strict=True)]  # fmt: skip
    for a, b in pairs:
        assert (a.double() - b).abs().max() < times_eps * torch.finfo(dtype).eps * b.abs().max()


def test_loss_with_images_equals_that_on_the_cpu():
    found, tokens = batch()
    model, copy = (init_weights(Transformer(replace(tiny(), dense_layers=4, vision=VISION)), 0) for _ in range(2))
    ids = torch.randint(0, 512, (1, tokens + 10))
    targets = ids.roll(-1, 1)
    here = model.loss(ids, targets, images=found)
    here.nats.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    there = copy.cuda().loss(ids.cuda(), targets.cuda(), images=found.to("cuda"))
    there.nats.backward()
    torch.testing.assert_close(there.nats.cpu(), here.nats, rtol=1e-4, atol=1e-4)
    for name, p in copy.named_parameters():
        if name.startswith(("vision_tower.", "mm_projector.")):
            scale = gradients[name].abs().max()
            assert (p.grad.cpu() - gradients[name]).abs().max() < 2e-2 * scale, name


def test_bf16_follows_fp32_with_its_eps():
    found, _ = batch()
    model = init_weights(Transformer(replace(tiny(), vision=replace(VISION, norm_eps=2**-7))), 0).cuda()
    with torch.no_grad():
        wide = model.image_rows(found.to("cuda"))
        model.compute_dtype = torch.bfloat16
        low = model.image_rows(found.to("cuda"))
    assert (low.float() - wide).abs().max() < 0.1 * wide.abs().max()


def test_a_large_image_needs_no_matrix_of_scores():
    """16,384 patches and 8 heads: the scores of one head would be 0.5 GB in bf16."""
    given = [torch.randn(16384, 8, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed_attention(*given, [16384], 128**-0.5).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * given[0].nbytes
