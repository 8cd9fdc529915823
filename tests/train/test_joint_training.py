"""Text and pictures in one run: what is trained on, exact resume, and nothing changes for a run without pictures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from test_resume import StopAfter, bits, timeless

from perilune.config import CheckpointConfig, DataConfig, StageConfig, TrainConfig, VisionConfig, VisionDataConfig
from perilune.config.presets import tiny
from perilune.errors import CheckpointError, ConfigError
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.train.step import batch_loss, split_rows

pytest.importorskip("PIL", reason="pictures need the extra vision")

TOWER = VisionConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=32, patch_size=7, position_grid=4)


@pytest.fixture(scope="session")
def joint(config: TrainConfig) -> TrainConfig:
    """The base run with pictures in half of the windows, through two window lengths."""
    return replace(
        config,
        model=replace(tiny(), vision=TOWER),
        data=replace(config.data, vision=VisionDataConfig(share=0.5, image_size=28, kinds=("shape", "grid"))),
        stages=(StageConfig(seq_len=64, fraction=0.5), StageConfig(seq_len=128, fraction=0.5)),
        steps=6,
        tokens_per_step=512,
        microbatch_tokens=256,
    )


def test_pictures_come_from_the_first_step_on_and_only_answers_are_targets(start, joint):
    trainer = start("joint", joint)
    pad = trainer.data.tokenizer.special.ids["<|media_pad|>"]
    for step, length in ((0, 64), (5, 128)):
        batch = trainer.data.loader.batch(step)
        assert batch.ids_BT.shape[1] == length
        with_images = [row for row, own in enumerate(batch.images) if own]
        assert len(with_images) == batch.ids_BT.shape[0] // 2
        images = batch.image_batch()
        assert images is not None
        # The images' positions are exactly the media pads, and no framing token is ever a target.
        assert torch.equal((batch.ids_BT == pad).flatten().nonzero().flatten(), images.positions.sort().values)
        special = trainer.data.tokenizer.special
        framing = [
            special.ids[name] for name in ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
        ]
        assert not torch.isin(batch.targets_BT, torch.tensor(framing)).any()
        # Whatever lies between the framing markers (the size) is no target either.
        for row in with_images:
            targets = batch.targets_BT[row].tolist()
            for placed in batch.images[row]:
                begin = placed.position - 1
                while int(batch.ids_BT[row, begin]) != framing[0]:
                    begin -= 1
                end = placed.position + placed.image.tokens
                assert targets[max(0, begin - 1) : end] == [-100] * (end - max(0, begin - 1))
                assert (
                    targets[end] != -100 or int(batch.ids_BT[row, end + 1]) not in special
                )  # a caption, or a question


def test_split_rows_keep_their_own_images(start, joint):
    """The loss of the micro-batches adds up to the loss of the whole batch."""
    trainer = start("split", joint)
    batch, model = trainer.data.loader.batch(0), trainer.model.eval()
    parts = split_rows(batch, 128)
    assert sum(len(own) for part in parts for own in part.images) == sum(map(len, batch.images)) >= 4
    with torch.no_grad():
        whole, pieces = batch_loss(model, batch), [batch_loss(model, part) for part in parts]
    assert sum(piece.tokens for piece in pieces) == whole.tokens
    assert torch.allclose(torch.stack([piece.nats for piece in pieces]).sum(), whole.nats, rtol=1e-5)


def test_the_tower_learns_and_metrics_say_what_was_seen(start, joint):
    trainer = start("learns", replace(joint, eval=replace(joint.eval, every=3)))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.fit()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(before[name], p)}
    assert {name for name in before if name.startswith(("vision_tower", "mm_projector"))} <= moved
    records = trainer.run.read_metrics()
    assert all(record["images"] > 0 for record in records if record["kind"] == "train")
    scored = [record for record in records if record["kind"] == "eval_pictures"]
    assert [record["step"] for record in scored] == [3, 6]
    assert scored[1]["nats_per_token"] < scored[0]["nats_per_token"]


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_with_pictures_resumes_bit_for_bit(start, joint, step):
    """Stopped before and after the change of window length."""
    whole = start("whole", joint)
    whole.fit()
    start("stopped", joint, callbacks=[StopAfter(step)]).fit()
    again = start("stopped", None, resume=True)
    assert again.step == step
    assert again.fit().finished
    assert bits(again.run, 6) == bits(whole.run, 6)
    assert timeless(again.run) == timeless(whole.run)


def test_other_pictures_are_another_run(start, joint, monkeypatch):
    """Fonts and the drawing library decide the pixels, so a run does not go on with others."""
    start("fonts", joint, callbacks=[StopAfter(2)]).fit()
    monkeypatch.setattr("perilune.data.drawn.catalogue.text_fonts", lambda: ("Pillow", "Other.ttf"))
    with pytest.raises(CheckpointError, match="not the one that"):
        start("fonts", None, resume=True)


def test_without_pictures_batches_and_losses_are_what_they_were(start, config):
    """The recorded loss curve of the text run is checked in test_trainer; here: nothing of pictures is in it."""
    trainer = start("text", config)
    assert trainer.data.pictures is None
    assert trainer.data.loader.batch(0).images == ()
    assert trainer.data.loader.batch(0).image_batch() is None
    trainer.fit()
    records = trainer.run.read_metrics()
    assert all("images" not in record for record in records)
    assert {record["kind"] for record in records} == {"train", "eval", "sample"}


def test_a_tower_without_pictures_trains_on_text(start, config):
    """Parameters without a gradient count as zero; the tower only decays."""
    trainer = start("idle", replace(config, model=replace(tiny(), vision=TOWER), steps=2))
    reference = init_weights(Transformer(trainer.config.model), trainer.config.seed)
    trainer.fit()
    norms = {n: p for n, p in trainer.model.named_parameters() if n.startswith("vision") and p.dim() == 1}
    assert norms and all(torch.equal(p.detach(), reference.get_parameter(n)) for n, p in norms.items())


def test_mistakes_are_told_before_anything_is_trained(start, joint, config):
    with pytest.raises(ConfigError, match="does not fit into a window of 16 tokens"):
        start("short", replace(joint, stages=(StageConfig(seq_len=16),)))
    with pytest.raises(ConfigError, match="model.vision is not set"):
        replace(joint, model=tiny())
    with pytest.raises(ConfigError, match="image_size=30 must be a multiple of 14"):
        replace(joint, data=replace(joint.data, vision=VisionDataConfig(share=0.5, image_size=30)))
    with pytest.raises(ConfigError, match="more than 1 together"):
        DataConfig(synthetic=("copy",), synthetic_fraction=0.6, vision=VisionDataConfig(share=0.5))
    with pytest.raises(ConfigError, match=r"data.vision.kinds=\['cats'\] must name some of: shape"):
        VisionDataConfig(kinds=("cats",))
    with pytest.raises(ConfigError, match=r"data.vision.share=1.5 must lie in \[0, 1\]"):
        VisionDataConfig(share=1.5)


def test_a_run_of_pictures_alone_is_allowed(start, joint):
    everything = replace(joint.data, vision=replace(joint.data.vision, share=1.0))
    trainer = start("all", replace(joint, data=everything, steps=1, checkpoint=CheckpointConfig()))
    trainer.fit()
    assert json.loads((trainer.run.path / "summary.json").read_text())["train"]["steps"] == 1
