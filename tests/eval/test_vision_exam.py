"""The exam about pictures: intervals, marking, and answers equal to those of plain forward passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from perilune.config import DataConfig, TrainConfig, VisionConfig, VisionDataConfig
from perilune.config.presets import tiny
from perilune.data.drawn import Catalogue, DocumentWriter, kinds
from perilune.data.image_input import image_processor
from perilune.errors import RequestError
from perilune.eval.intervals import Z95, Share
from perilune.eval.picture_samples import write_samples
from perilune.eval.vision import Exam, Reply, answer, examine, table
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.model.vision import ImageBatch
from perilune.tokenizer import ByteTokenizer

pytest.importorskip("PIL", reason="pictures need the extra vision")

TOKENIZER = ByteTokenizer()
TOWER = VisionConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=32, patch_size=7, position_grid=4)
CONFIG = TrainConfig(
    model=replace(tiny(), vocab_size=TOKENIZER.vocab_size, vision=TOWER),
    data=DataConfig(vision=VisionDataConfig(share=0.5, image_size=28)),
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Random weights, large enough for the pictures to matter."""
    made = init_weights(Transformer(CONFIG.model), 0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
        made.mm_projector.post_norm.weight.fill_(1.0)
    return made.eval()


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (1, 10), (5, 10), (10, 10), (183, 200)])
def test_wilson_ends_where_the_normal_test_would_just_not_refuse(correct, total):
    share = Share(correct, total)
    low, high = share.interval
    assert 0.0 <= low <= share.value <= high <= 1.0
    for end in (low, high):
        if 0.0 < end < 1.0:
            assert abs(end - share.value) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / total), rel=1e-6)
    if correct == 0:
        assert (low, high) == (0.0, pytest.approx(0.27753, abs=1e-5))  # published table value


def test_no_trials_say_nothing():
    assert Share(0, 0).interval == (0.0, 1.0) and math.isnan(Share(0, 0).value)


def exam(replies: list[str], right: list[str], candidates=("a", "b")) -> Exam:
    drawings = tuple(Catalogue(kinds(["shape"]), 28, 0).draw(n, "held_out") for n in range(len(right)))
    return Exam(
        "shape", "held_out", "shape", drawings, "?", tuple(right), tuple(Reply(r, r) for r in replies), candidates
    )


def test_blind_marks_the_answers_to_other_pictures():
    right = ["a", "b", "a", "b", "b"]
    result = exam(right, right).as_json()
    assert result["generated"]["accuracy"] == result["scored"]["accuracy"] == 1.0
    # Answer n - 1 against question n: only the last b agrees with the b before it.
    assert result["blind_generated"]["correct"] == result["blind_scored"]["correct"] == 1
    assert result["chance"] == 0.5
    always = exam(["b"] * 5, right).as_json()
    assert always["generated"]["correct"] == always["blind_generated"]["correct"] == 3  # looking did not help
    assert "scored" not in exam(right, right, ()).as_json() and "chance" not in exam(right, right, ()).as_json()


def test_answers_are_those_of_whole_forward_passes(model):
    """No state, no batch: each prompt alone, token by token; each candidate by its own full pass."""
    writer = DocumentWriter(TOKENIZER, image_processor(CONFIG), chat=1.0)
    catalogue = Catalogue(kinds(["shape"]), 56, 0)
    images = [writer.processor.process(catalogue.draw(n, "held_out").image) for n in range(5)]
    prompts = [writer.chat_prompt(image, "What shape is it?") for image in images]
    assert len({len(prompt.ids) for prompt in prompts}) > 1  # several lengths, and some of one
    candidates = ("a star", "a ring", "a heart")
    found = answer(model, TOKENIZER, prompts, candidates)
    for prompt, reply in zip(prompts, found, strict=True):
        where = prompt.image.position + torch.arange(prompt.image.image.tokens)
        shown = ImageBatch.collate([prompt.image.image], where)

        def logits(ids: list[int], shown: ImageBatch = shown) -> torch.Tensor:
            with torch.no_grad():
                return model(torch.tensor([ids]), images=shown).logits_BTZ[0]

        ids, drawn = prompt.ids.tolist(), []
        while len(drawn) < 24:
            token = int(logits(ids + drawn)[-1].argmax())
            if token in TOKENIZER.special:
                break
            drawn.append(token)
        assert reply.generated == TOKENIZER.decode(drawn)
        costs = []
        for candidate in candidates:
            ending = [*TOKENIZER.encode(candidate), TOKENIZER.special.close]
            scores = logits(ids + ending)[len(ids) - 1 : -1].log_softmax(-1)
            costs.append(-float(scores[torch.arange(len(ending)), torch.tensor(ending)].sum()))
        assert reply.best == candidates[min(range(3), key=costs.__getitem__)]
    assert len({reply.generated for reply in found}) > 1  # the pictures are looked at


def test_an_exam_asks_both_parts_about_everything(model, tmp_path):
    exams = examine(model, TOKENIZER, CONFIG, pictures=3)
    assert {(e.part, e.about) for e in exams} == {
        (part, about) for part in ("held_out", "unseen") for about in ("what", "shape", "colour", "size")
    }
    assert not model.training
    result = table(exams)
    assert result["held_out"]["shape"]["generated"]["total"] == 3 and result["unseen"]["colour"]["chance"] == 1 / 8
    samples = write_samples(exams, tmp_path, held_out=2, unseen=1)
    assert [sample["part"] for sample in samples] == ["held_out", "held_out", "unseen"]
    assert all((tmp_path / sample["file"]).read_bytes().startswith(b"\x89PNG") for sample in samples)
    assert samples[0]["right"] == exams[0].right[0] and samples[0]["answer"] == exams[0].replies[0].generated


def test_a_run_without_pictures_cannot_be_asked(model):
    with pytest.raises(RequestError, match="not trained on pictures"):
        examine(model, TOKENIZER, replace(CONFIG, data=DataConfig()))
