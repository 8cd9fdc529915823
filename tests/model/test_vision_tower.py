"""The vision tower and projector against loops in float64, against the K2.5 tower of another library, and in other packings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import random_model
from vision_reference import projector_item, tower_item

from perilune.config import VisionConfig
from perilune.config.presets import k3, tiny
from perilune.errors import ConfigError, RequestError
from perilune.model import ImageBatch, Transformer
from perilune.model.vision.positions import frame_code, grid_angles, resized_table
from perilune.shapes.tensors import projector_tensors, vision_tensors

VISION = VisionConfig(
    hidden_size=24, num_layers=2, num_heads=2, head_dim=16, mlp_size=40, patch_size=4, position_grid=6
)
GRIDS = [(1, 4, 6), (3, 2, 4), (1, 6, 6), (1, 4, 6), (2, 8, 2)]


class Item:
    """What the model needs of an image."""

    def __init__(self, grid, seed, patch=4):
        self.grid = grid
        generator = torch.Generator().manual_seed(seed)
        self.patches = torch.rand(grid[0] * grid[1] * grid[2], 3, patch, patch, generator=generator) * 2 - 1


def items(grids=GRIDS):
    return [Item(grid, seed) for seed, grid in enumerate(grids)]


def batch(images, dtype=torch.float32):
    found = ImageBatch.collate(images, [])
    return found._replace(patches=found.patches.to(dtype))


def vision_model(dtype=torch.float32, **changes):
    return random_model(replace(tiny(), vision=replace(VISION, **changes)), dtype=dtype)


def arrays(model):
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def model():
    return vision_model()


def test_published_sizes_on_the_meta_device():
    cfg = k3()
    with torch.device("meta"):
        model = Transformer(replace(tiny(), hidden_size=cfg.hidden_size, vision=cfg.vision))
    assert sum(p.numel() for p in model.vision_tower.parameters()) == 401_214_464
    assert sum(p.numel() for p in model.mm_projector.parameters()) == 46_144_512
    ours = {n: tuple(p.shape) for n, p in model.named_parameters() if n.startswith(("vision_tower.", "mm_projector."))}
    specs = [*vision_tensors(cfg.vision), *projector_tensors(cfg.vision, cfg.hidden_size)]
    assert ours == {spec.name: spec.shape for spec in specs}
    assert len(ours) == 165 + 3


@pytest.mark.parametrize("eps", [None, 2**-7])
def test_features_and_rows_equal_the_loops(eps):
    model = vision_model(norm_eps=eps)
    images = items()
    packed = batch(images)
    with torch.no_grad():
        features = model.vision_tower(packed.patches, packed.grids)
        rows = model.mm_projector(features, packed.grids)
    weights, used = arrays(model), torch.finfo(torch.float32).eps if eps is None else eps
    true_features = [tower_item(weights, VISION, i.patches.double().numpy(), i.grid, used) for i in images]
    true_rows = [projector_item(weights, VISION, f, i.grid) for f, i in zip(true_features, images, strict=True)]
    assert np.concatenate(true_rows).std() > 0.01
    np.testing.assert_allclose(features.numpy(), np.concatenate(true_features), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rows.numpy(), np.concatenate(true_rows), rtol=1e-5, atol=1e-5)


def test_float64_equals_the_loops_far_closer():
    model = vision_model(torch.float64)
    image = Item((2, 4, 6), 0)
    packed = batch([image], torch.float64)
    with torch.no_grad():
        features = model.vision_tower(packed.patches, packed.grids)
    truth = tower_item(
        arrays(model), VISION, image.patches.double().numpy(), image.grid, torch.finfo(torch.float64).eps
    )
    np.testing.assert_allclose(features.numpy(), truth, rtol=1e-11, atol=1e-11)


def test_norm_eps_is_that_of_the_compute_dtype():
    """bf16 has 2^-7: features of small size then differ much from those of the same weights in fp32 (architecture §8.5)."""
    packed = batch([Item((1, 4, 4), 0)])
    small = packed._replace(patches=packed.patches * 0.01)

    def features(dtype, **changes):
        model = vision_model(dtype, **changes)
        with torch.no_grad():
            model.vision_tower.patch_embed.pos_emb.weight.mul_(0.01)
            return model.vision_tower(small.patches.to(dtype), small.grids).float()

    low, wide, pinned = features(torch.bfloat16), features(torch.float32), features(torch.float32, norm_eps=2**-7)
    assert (low - pinned).abs().max() < 0.05 * pinned.abs().max()
    assert (wide - pinned).abs().max() > 0.5 * pinned.abs().max()


def test_a_single_frame_gets_no_code_and_equal_frames_differ_by_it_alone(model):
    image = Item((1, 4, 6), 0)
    clip = Item((4, 4, 6), 0)
    clip.patches = image.patches.repeat(4, 1, 1, 1)
    embed = model.vision_tower.patch_embed
    with torch.no_grad():
        one = embed(image.patches, [image.grid])
        four = embed(clip.patches, [clip.grid]).view(4, 24, -1)
        torch.testing.assert_close(four - one, frame_code(4, 24)[:, None].expand(4, 24, 24), rtol=0, atol=1e-6)
        # Row 0 of the code is not zero: an image must not get it.
        assert frame_code(1, 24)[0].sum() == 12
        places = embed.pos_emb([image.grid], torch.float32)
        assert torch.equal(places, resized_table(embed.pos_emb.weight, 4, 6))


def test_frames_of_a_clip_see_each_other_and_items_do_not(model):
    images = items()
    with torch.no_grad():
        before = model.vision_tower(*batch(images)[:2])
        images[1].patches[-1] += 1.0  # last patch of the last of three frames
        after = model.vision_tower(*batch(images)[:2])
    changed = (before != after).any(dim=1)
    start, stop = 24, 24 + 24
    assert changed[start:stop].all(), "first frame too: attention is joint over space and time"
    torch.testing.assert_close(before[:start], after[:start], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(before[stop:], after[stop:], rtol=1e-6, atol=1e-6)


def test_packed_items_equal_each_alone_and_permuting_items_permutes_rows(model):
    images = items()
    packed = batch(images)
    with torch.no_grad():
        together = model.image_rows(packed)
        alone = [model.image_rows(batch([image])) for image in images]
        order = [3, 1, 4, 0, 2]
        permuted = model.image_rows(batch([images[i] for i in order]))
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(permuted, torch.cat([alone[i] for i in order]), rtol=1e-5, atol=1e-6)


def test_table_is_unchanged_at_its_own_size_and_gets_gradient_when_resized():
    table = torch.randn(6, 6, 4, requires_grad=True)
    assert torch.equal(resized_table(table, 6, 6), table.flatten(0, 1))
    resized_table(table, 4, 2).sum().backward()
    assert torch.count_nonzero(table.grad) > 0
    constant = resized_table(torch.ones(6, 6, 4), 10, 3)
    torch.testing.assert_close(constant, torch.ones(30, 4))


def test_rotation_makes_scores_depend_on_offsets_alone():
    """Two patches two columns and one row apart score alike wherever they are."""
    angles = grid_angles(9, 9, 16, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles).view(9, 9, 8)
    q, k = torch.randn(8, dtype=torch.complex128), torch.randn(8, dtype=torch.complex128)
    scores = [((q * turn[y, x]) * (k * turn[y + 1, x + 2]).conj()).real.sum() for y, x in ((0, 0), (5, 3), (7, 6))]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(turn[0, 3], turn[3, 0]), "columns and rows turn different channels"


def test_gradients_by_finite_differences():
    model = vision_model(torch.float64, num_layers=1, hidden_size=8, mlp_size=8, num_heads=1, head_dim=4, patch_size=2)
    packed = batch([Item((2, 2, 2), 0, patch=2), Item((1, 2, 4), 1, patch=2)], torch.float64)
    names = [n for n, _ in model.named_parameters() if n.startswith(("vision_tower.", "mm_projector."))]
    probe = torch.randn(1 + 2, model.cfg.hidden_size, dtype=torch.float64)
    (model.image_rows(packed) * probe).sum().backward()
    parameters = dict(model.named_parameters())
    for name in names:
        p = parameters[name]
        direction = torch.randn_like(p)
        with torch.no_grad():
            p.add_(direction, alpha=1e-6)
            above = (model.image_rows(packed) * probe).sum()
            p.add_(direction, alpha=-2e-6)
            below = (model.image_rows(packed) * probe).sum()
            p.add_(direction, alpha=1e-6)
        torch.testing.assert_close((p.grad * direction).sum(), (above - below) / 2e-6, rtol=1e-4, atol=1e-7, msg=name)


def test_what_the_tower_cannot_take_is_refused(model):
    image = Item((1, 4, 4), 0)
    patches = image.patches

    def run(patches, *grids):
        return model.vision_tower(patches, torch.tensor(grids))

    with pytest.raises(RequestError, match="item 1 has 5 frames; this model takes 1 to 4"):
        run(patches, (1, 2, 2), (5, 2, 2))
    with pytest.raises(RequestError, match="grid of 3 x 4 patches; sides must be multiples of 2"):
        run(patches, (1, 3, 4))
    with pytest.raises(RequestError, match="2 x 514 patches.*2..512"):
        run(patches, (1, 2, 514))
    with pytest.raises(RequestError, match=r"\[16, 3, 4, 4\].*need \[8, 3, 4, 4\]"):
        run(patches, (1, 2, 4))
    with pytest.raises(RequestError, match="patch size"):
        run(torch.zeros(16, 3, 14, 14), (1, 4, 4))
    with pytest.raises(RequestError, match="no image to collate"):
        ImageBatch.collate([], [])
    with pytest.raises(RequestError, match="cannot be packed"):
        ImageBatch.collate([image, Item((1, 2, 2), 0, patch=14)], [])


def test_settings_of_the_tower_are_checked():
    for change, words in (({"head_dim": 18}, "multiple of 4"), ({"hidden_size": 25}, "even"), ({"norm_eps": 0.0}, "above 0"),
                          ({"max_frames": 0}, "at least 1")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            replace(VISION, **change)


def test_equals_the_k25_tower_of_another_library_where_both_define_the_same():
    """transformers' Kimi K2.5 tower with its biases at 0, RMSNorm put in, and bilinear table: all that MoonViT-V2 changed.

    Its queries and keys have the channels of a pair half a head apart, ours side by side, so their rows are moved.
    """
    peer = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25", reason="no kimi_k25 in transformers")
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig

    vision = replace(VISION, hidden_size=32, num_heads=2, head_dim=16)
    ours = random_model(replace(tiny(), vision=vision), dtype=torch.float32)
    cfg = Kimi_K25VisionConfig(
        patch_size=4, pos_emb_height=6, pos_emb_width=6, pos_emb_time=4, num_attention_heads=2, num_hidden_layers=2,
        hidden_size=32, intermediate_size=40, rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = peer.Kimi_K25VisionModel(cfg).float().eval()
    for name, module in list(theirs.named_modules()):
        if isinstance(module, torch.nn.LayerNorm):
            theirs.set_submodule(name, torch.nn.RMSNorm(32))
    theirs.patch_embed.pos_emb.interpolation_mode = "bilinear"
    apart = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    moved = torch.cat([apart, 16 + apart])
    tower = ours.vision_tower
    state = {name: torch.zeros_like(value) for name, value in theirs.state_dict().items()}
    state["patch_embed.proj.weight"] = tower.patch_embed.proj.weight
    state["patch_embed.pos_emb.position_embeddings"] = tower.patch_embed.pos_emb.weight
    state["final_layernorm.weight"] = tower.encoder.final_layernorm.weight
    for index, block in enumerate(tower.encoder.blocks):
        at = f"layers.{index}."
        q, k, v = block.wqkv.weight.chunk(3)
        state |= {
            f"{at}norm1.weight": block.norm0.weight, f"{at}norm2.weight": block.norm1.weight,
            f"{at}attn.q_proj.weight": q[moved], f"{at}attn.k_proj.weight": k[moved], f"{at}attn.v_proj.weight": v,
            f"{at}attn.proj.weight": block.wo.weight,
            f"{at}mlp.fc1.weight": block.mlp.fc0.weight, f"{at}mlp.fc2.weight": block.mlp.fc1.weight,
        }  # fmt: skip
    theirs.load_state_dict(state)
    packed = batch(items())
    with torch.no_grad():
        features = tower(packed.patches, packed.grids)
        found = theirs(packed.patches, packed.grids)
    assert features.std() > 0.1
    torch.testing.assert_close(features, found.last_hidden_state, rtol=1e-5, atol=1e-5)
    from perilune.model.vision.projector import merge_patches

    merged = merge_patches(features, GRIDS, 2)
    torch.testing.assert_close(merged, found.pooler_output.flatten(1), rtol=1e-5, atol=1e-5)
