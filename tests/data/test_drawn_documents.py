"""Documents around pictures, and windows of them: framing, loss on answers only, whole documents, any number of processes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from perilune.data.curriculum import Curriculum
from perilune.data.drawn import Catalogue, DocumentWriter, DrawnSource, Question, kinds
from perilune.data.image import ImageProcessor, ImageProcessorConfig
from perilune.data.loader import Loader
from perilune.data.packing import IGNORE
from perilune.data.shards import write_store
from perilune.data.sources import TextSource
from perilune.errors import ConfigError
from perilune.tokenizer import ByteTokenizer

pytest.importorskip("PIL", reason="pictures need the extra vision")

TOKENIZER = ByteTokenizer()
SPECIAL = TOKENIZER.special.ids
PROCESSOR = ImageProcessor(ImageProcessorConfig(patch_size=7, merge=2, patch_limit_on_one_side=4, in_patch_limit=16))


def writer(chat: float = 0.0) -> DocumentWriter:
    return DocumentWriter(TOKENIZER, PROCESSOR, chat=chat)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, 250, size=n).tolist(), n) for n in rng.integers(20, 300, size=40)]
    folder = tmp_path_factory.mktemp("d") / "s"
    return write_store(folder, documents, eos=TOKENIZER.special.eos, vocab_size=TOKENIZER.vocab_size, fingerprint="f")


def source(store, chat: float = 0.4, *names: str) -> DrawnSource:
    return DrawnSource(Catalogue(kinds(names or ("shape", "shapes")), 28, 0), writer(chat), store)


def test_a_caption_stands_behind_the_published_framing():
    drawing = Catalogue(kinds(["shape"]), 28, 0).draw(3)
    image = PROCESSOR.process(drawing.image)
    made = writer().captioned(image, "a red circle")
    width, height = drawing.image.size
    given = [SPECIAL["<|media_begin|>"], *TOKENIZER.encode(f"image {width}x{height}"), SPECIAL["<|media_content|>"],
             *[SPECIAL["<|media_pad|>"]] * image.tokens, SPECIAL["<|media_end|>"]]  # fmt: skip
    answer = [*TOKENIZER.encode("a red circle"), TOKENIZER.special.eos]
    assert made.ids.tolist() == given + answer
    assert made.targets.tolist() == [IGNORE] * (len(given) - 1) + answer + [IGNORE]
    assert made.image.position == given.index(SPECIAL["<|media_pad|>"])
    assert writer().caption_prompt(image).ids.tolist() == given


def test_a_chat_begins_with_its_prompt_and_only_the_answer_is_a_target():
    image = PROCESSOR.process(Catalogue(kinds(["shape"]), 28, 0).draw(0).image)
    made = writer().answered(image, Question("shape", "What shape is it?", "a star"))
    prompt = writer().chat_prompt(image, "What shape is it?")
    n = len(prompt.ids)
    assert made.ids[:n].tolist() == prompt.ids.tolist() and made.image.position == prompt.image.position
    assert (made.targets[: n - 1] == IGNORE).all() and (prompt.targets == IGNORE).all()
    assert made.targets[n - 1 : -1].tolist() == made.ids[n:].tolist() and made.targets[-1] == IGNORE
    assert TOKENIZER.decode(made.ids[n:]) == "a starresponsemessage" and made.ids[-1] == TOKENIZER.special.end_of_msg


def test_every_subject_is_asked_equally_often():
    catalogue, counts = Catalogue(kinds(["shape"]), 28, 0), Counter()
    for n in range(400):
        drawing = catalogue.draw(n)
        text = TOKENIZER.decode(writer(1.0).document(drawing, 10_000).ids)
        counts.update({question.about for question in drawing.questions if question.text in text})
    assert counts.total() == 400
    assert set(counts) == {"what", "shape", "colour", "size"}
    assert min(counts.values()) > 50


def test_windows_hold_whole_documents_and_text_behind_them(store):
    made = source(store)
    eos, pad = TOKENIZER.special.eos, SPECIAL["<|media_pad|>"]
    filled = 0
    for index in range(12):
        window = made.window(index, 256, [5, 0, 1])
        assert window.ids.shape == window.targets.shape == window.starts.shape == (256,)
        assert window.starts[0] and window.images
        covered = np.zeros(256, dtype=bool)
        for placed in window.images:
            covered[placed.position : placed.position + placed.image.tokens] = True
        assert np.array_equal(covered, window.ids == pad)  # pads are exactly the images' places, none is cut off
        ends = [*np.flatnonzero(window.starts)[1:], 256]
        whole = 0
        for begin, end in zip(np.flatnonzero(window.starts), ends, strict=True):
            if SPECIAL["<|media_begin|>"] in window.ids[begin:end]:
                assert window.ids[end - 1] in (eos, TOKENIZER.special.end_of_msg)
                whole += 1
        assert whole == len(window.images)
        filled += int((~np.isin(window.targets[window.images[-1].position :], [IGNORE])).sum() > 40)
    assert filled  # text with targets stands behind the last picture of some windows
    again = made.window(3, 256, [5, 0, 1])
    assert np.array_equal(again.ids, made.window(3, 256, [5, 0, 1]).ids)
    assert not np.array_equal(again.ids, made.window(3, 256, [6, 0, 1]).ids)


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_sees_the_same_pictures(store, world):
    def loader(rank: int, of: int) -> Loader:
        sources = {"text": (TextSource(store), 0.5), "pictures": (source(store), 0.5)}
        return Loader(
            sources, Curriculum([(128, 0.5), (256, 0.5)], steps=8, tokens_per_step=1024), seed=3, rank=rank, world=of
        )

    one, shared = loader(0, 1), [loader(rank, world) for rank in range(world)]
    for step in (0, 3, 4, 7):
        whole, parts = one.batch(step), [each.batch(step) for each in shared]
        assert torch.equal(torch.cat([part.ids_BT for part in parts]), whole.ids_BT)
        mine = [own for part in parts for own in (part.images or ((),) * len(part.ids_BT))]
        assert [[p.position for p in own] for own in mine] == [[p.position for p in own] for own in whole.images]
        patches = [p.image.patches for own in mine for p in own]
        assert torch.equal(torch.cat(patches), whole.image_batch().patches)
    assert len({each.fingerprint for each in [one, *shared]}) == 1


def test_held_out_pictures_are_in_no_window(store):
    made = source(store, 0.0, "shape")
    batch = made.held_out(20)
    assert len(batch.images[0]) == 20 == int(batch.starts_BT.sum())
    trained = {p.image.patches.numpy().tobytes() for i in range(40) for p in made.window(i, 256, [0, 0, 1]).images}
    assert not trained & {p.image.patches.numpy().tobytes() for p in batch.images[0]}


def test_a_window_too_short_for_any_picture_is_refused(store):
    with pytest.raises(ConfigError, match="does not fit into a window of 20 tokens"):
        source(store).window(0, 20, [0])


def test_large_pictures_come_down_to_the_size_that_the_tower_knows():
    """A side that is scaled must not be padded to one patch more than the limit."""
    for n in range(60):
        image = PROCESSOR.process(Catalogue(kinds(["shape"]), 28, 0).draw(n).image)
        assert max(image.grid) <= 4 and image.tokens == image.grid[1] * image.grid[2] // 4
