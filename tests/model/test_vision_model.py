"""Images inside the text model: whose rows go where, what gets gradients, prefill in chunks, and what is refused."""

from dataclasses import replace

import pytest
import torch
from models import random_ids, random_model

from perilune.config import VisionConfig
from perilune.config.presets import tiny
from perilune.errors import RequestError
from perilune.model import ImageBatch, ImageRows, Transformer, init_weights
from perilune.ops.segments import Segments

VISION = VisionConfig(
    hidden_size=24, num_layers=2, num_heads=2, head_dim=16, mlp_size=40, patch_size=4, position_grid=6
)
CFG = replace(tiny(), vision=VISION)
PAD = 7


class Item:
    def __init__(self, grid, seed):
        self.grid = grid
        generator = torch.Generator().manual_seed(seed)
        self.patches = torch.rand(grid[0] * grid[1] * grid[2], 3, 4, 4, generator=generator) * 2 - 1
        self.tokens = grid[1] * grid[2] // 4


@pytest.fixture(scope="module")
def model():
    return random_model(CFG)


@pytest.fixture
def prompt():
    """Two rows of 40 tokens: an image of 6 tokens and a clip of 2 in the first, an image of 9 in the second."""
    ids = random_ids(CFG, 2, 40)
    images = [Item((1, 4, 6), 0), Item((3, 2, 4), 1), Item((1, 6, 6), 2)]
    positions = [*range(5, 11), *range(20, 22), *range(40 + 30, 40 + 39)]
    ids.view(-1)[positions] = PAD
    return ids, ImageBatch.collate(images, positions), images


def test_rows_replace_embedding_rows_in_order(model, prompt):
    ids, batch, images = prompt
    with torch.no_grad():
        x = model.embeddings(ids, batch)
        plain = model.embeddings(ids)
        rows = [model.image_rows(ImageBatch.collate([image], [])) for image in images]
    torch.testing.assert_close(x.flatten(0, 1)[batch.positions], torch.cat(rows))
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[batch.positions] = False
    assert torch.equal(x.flatten(0, 1)[untouched], plain.flatten(0, 1)[untouched])


def test_the_text_hears_the_image_and_only_later_text(model, prompt):
    ids, batch, images = prompt
    other = images[1].patches.clone()
    with torch.no_grad():
        before = model(ids, images=batch).logits_BTZ
        images[1].patches = other + 0.5
        after = model(ids, images=ImageBatch.collate(images, batch.positions)).logits_BTZ
        text = model(ids).logits_BTZ
    torch.testing.assert_close(before[0, :20], after[0, :20], rtol=0, atol=1e-10)
    assert (before[0, 20:] - after[0, 20:]).abs().amax(dim=-1).min() > 1e-6
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=1e-10)
    assert (text[0, 5:] - before[0, 5:]).abs().max() > 1e-3


def test_gradients_reach_the_tower_and_never_the_pad_embedding(prompt):
    ids, batch, _ = prompt
    model = random_model(CFG)
    targets = ids.roll(-1, 1).clone()
    targets[:, -1] = -100
    model.loss(ids, targets, images=batch).nats.backward()
    assert torch.count_nonzero(model.embed.weight.grad[PAD]) == 0
    for name, parameter in model.named_parameters():
        if name.startswith(("vision_tower.", "mm_projector.")):
            assert torch.count_nonzero(parameter.grad) > 0, name


def test_loss_token_nats_and_logits_agree(model, prompt):
    ids, batch, _ = prompt
    targets = ids.roll(-1, 1).clone()
    targets.view(-1)[batch.positions] = -100
    with torch.no_grad():
        logits = model(ids, images=batch).logits_BTZ
        truth = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        torch.testing.assert_close(model.token_nats(ids, targets, images=batch).flatten(), truth, rtol=1e-9, atol=1e-9)
        loss = model.loss(ids, targets, images=batch)
    torch.testing.assert_close(loss.nats, truth.sum(), rtol=1e-9, atol=1e-9)
    assert loss.tokens == 80 - 17


def test_prefill_in_chunks_between_images(model, prompt):
    ids, batch, images = prompt
    row = ids[:1]
    whole = ImageBatch.collate(images[:2], batch.positions[:8])
    with torch.no_grad():
        truth = model(row, images=whole).logits_BTZ
        state = model.new_state(1)
        parts = [
            model(row[:, :12], state, images=ImageBatch.collate(images[:1], batch.positions[:6])).logits_BTZ,
            model(row[:, 12:19], state).logits_BTZ,
            model(row[:, 19:], state, images=ImageBatch.collate(images[1:2], batch.positions[6:8] - 19)).logits_BTZ,
        ]
    torch.testing.assert_close(torch.cat(parts, 1), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_prefill_in_chunks_that_cut_images(model, prompt, size):
    ids, batch, images = prompt
    row = ids[:1]
    whole = ImageBatch.collate(images[:2], batch.positions[:8])
    with torch.no_grad():
        truth = model(row, images=whole).logits_BTZ
        rows = model.image_rows(whole)
        state = model.new_state(1)
        parts = []
        for start in range(0, 40, size):
            here = (whole.positions >= start) & (whole.positions < start + size)
            chunk = ImageRows(rows[here], whole.positions[here] - start)
            parts.append(model(row[:, start : start + size], state, images=chunk).logits_BTZ)
    torch.testing.assert_close(torch.cat(parts, 1), truth, rtol=1e-9, atol=1e-9)


def test_packed_documents_with_images_equal_each_alone(model, prompt):
    ids, batch, images = prompt
    starts = torch.zeros(1, 40, dtype=torch.bool)
    starts[0, 15] = True
    packed = ImageBatch.collate(images[:2], batch.positions[:8])
    with torch.no_grad():
        both = model(ids[:1], segments=Segments.from_starts(starts), images=packed).logits_BTZ
        second = model(ids[:1, 15:], images=ImageBatch.collate(images[1:2], batch.positions[6:8] - 15)).logits_BTZ
    torch.testing.assert_close(both[:, 15:], second, rtol=1e-9, atol=1e-9)


def test_what_does_not_fit_is_refused_with_numbers_and_the_state_stays(model, prompt):
    ids, batch, images = prompt
    state = model.new_state(2)
    with pytest.raises(RequestError, match="give 17 rows, but 16 positions"):
        model(ids, state, images=batch._replace(positions=batch.positions[:16]))
    with pytest.raises(RequestError, match="give 17 rows, but 0 positions"):
        model(ids, images=batch._replace(positions=batch.positions[:0]))
    with pytest.raises(RequestError, match=r"from 5 to 80.*0\.\.79, the 80 tokens"):
        model(ids, state, images=batch._replace(positions=torch.cat([batch.positions[:16], torch.tensor([80])])))
    with pytest.raises(RequestError, match="16 different ones of 17"):
        model(ids, state, images=batch._replace(positions=torch.cat([batch.positions[:16], torch.tensor([5])])))
    assert state.lengths == [0, 0]
    text = random_model(tiny())
    for given in (batch, ImageRows(torch.zeros(17, 64), batch.positions)):
        with pytest.raises(RequestError, match=r"without a vision tower.*text only"):
            text(ids, images=given)


def test_no_images_is_the_text_model(model, prompt):
    ids, _, _ = prompt
    empty = ImageBatch(torch.empty(0, 3, 4, 4), torch.empty(0, 3, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    with torch.no_grad():
        assert torch.equal(model(ids, images=empty).logits_BTZ, model(ids).logits_BTZ)


def test_vision_leaves_the_initial_text_weights_and_projected_rows_start_as_large_as_embeddings():
    both, text = init_weights(Transformer(CFG), 3), init_weights(Transformer(tiny()), 3)
    shared = text.state_dict()
    assert all(torch.equal(tensor, both.state_dict()[name]) for name, tensor in shared.items())
    with torch.no_grad():
        rows = both.image_rows(ImageBatch.collate([Item((1, 6, 6), 0)], []))
        assert 0.8 < float(rows.square().mean().sqrt() / both.embed.weight.square().mean().sqrt()) < 1.2
    for name, parameter in both.named_parameters():
        if name.startswith("vision_tower.") and parameter.dim() > 1:
            assert abs(float(parameter.detach().std()) / CFG.init_range - 1) < 0.15, name


def test_bf16_follows_fp32(prompt):
    ids, batch, _ = prompt
    wide = random_model(replace(CFG, vision=replace(VISION, norm_eps=2**-7)), dtype=torch.float32)
    with torch.no_grad():
        truth = wide.image_rows(batch)
        wide.compute_dtype = torch.bfloat16
        low = wide.image_rows(batch)
    assert low.dtype == torch.bfloat16
    assert (low - truth).abs().max() < 0.1 * truth.abs().max()
