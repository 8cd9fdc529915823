"""Images in a conversation: the tower's rows where they belong, and kept states that know what was shown."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from perilune.config import DataConfig, TrainConfig, VisionConfig, VisionDataConfig
from perilune.config.presets import tiny
from perilune.data.image_input import image_processor
from perilune.errors import RequestError
from perilune.model import Transformer, init_weights
from perilune.model.vision import ImageBatch
from perilune.serve.chat_session import ChatSession
from perilune.serve.images import ShownImages
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import FieldError, SamplingParams
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml import render

Image = pytest.importorskip("PIL.Image", reason="images need the extra vision")

TOKENIZER = ByteTokenizer()
TOWER = VisionConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=32, patch_size=7, position_grid=4)
CONFIG = TrainConfig(
    model=replace(tiny(), vocab_size=TOKENIZER.vocab_size, vision=TOWER),
    data=DataConfig(vision=VisionDataConfig(share=0.5, image_size=28)),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def picture(seed: int, size: tuple[int, int] = (28, 28)) -> bytes:
    """A PNG file of random pixels."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = init_weights(Transformer(CONFIG.model), 0).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
        made.mm_projector.post_norm.weight.fill_(1.0)
    return made


def engine(model: Transformer, *, cache: bool = True, chunk: int = 512) -> LocalEngine:
    images = ShownImages(model, image_processor(CONFIG))
    settings = EngineSettings(unit=4, cache_bytes=2**22, prefix_cache=cache, chunk=chunk)
    return LocalEngine(model, TOKENIZER, name="eyes", images=images, settings=settings)


def asked(*pictures: bytes, text: str = "what is this?") -> list[dict]:
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def said(engine: LocalEngine, messages: list[dict]) -> tuple[str, int]:
    """The answer, and how many prompt tokens were not run again."""
    job = engine.chat(messages, GREEDY)
    return "".join(delta.text for delta in job), job.usage.cached_tokens


def direct(model: Transformer, *pictures: bytes) -> torch.Tensor:
    """Scores of the first answer token by one forward pass of the model."""
    processor = image_processor(CONFIG)
    images = [processor.process(each) for each in pictures]
    prompt = render(TOKENIZER, asked(*pictures), thinking=False, images=[(*i.original_size, i.tokens) for i in images])
    where = torch.cat([torch.arange(span.start, span.start + span.tokens) for span in prompt.media])
    with torch.no_grad():
        return model(torch.tensor([prompt.ids]), logits="last", images=ImageBatch.collate(images, where)).logits_BTZ[
            0, 0
        ]


@pytest.mark.parametrize("chunk", [512, 5, 1])
def test_a_prompt_in_chunks_is_the_models_own_pass(model, chunk):
    """Also where a chunk ends inside an image."""
    shown = engine(model, chunk=chunk)
    pictures = (picture(0), picture(1, (28, 42)))
    scores = []
    run = shown.core.runner.run
    shown.core.runner.run = lambda *plan: scores.append(run(*plan)) or scores[-1]
    list(shown.chat(asked(*pictures), replace(GREEDY, max_tokens=1)))
    (logits,) = scores[-1].logits.values()
    assert torch.allclose(logits, direct(model, *pictures), atol=2e-4)


def test_a_cached_prompt_serves_the_same_image_and_no_other(model):
    """Equal sizes give equal ids, so only what is shown tells the prompts apart."""
    shown, fresh = engine(model), engine(model, cache=False)
    first, second = asked(picture(0)), asked(picture(1))
    answers = [said(shown, messages) for messages in (first, second, first)]
    assert answers[0][0] == answers[2][0] == said(fresh, first)[0]
    assert answers[1][0] == said(fresh, second)[0]
    assert answers[0][1] == 0 and answers[2][1] > 20
    begin = render(TOKENIZER, first, thinking=False, images=[(28, 28, 4)]).media[0].start
    assert answers[1][1] <= begin


def test_a_conversation_goes_on_behind_its_images(model, tmp_path):
    (tmp_path / "a.png").write_bytes(picture(0))
    (tmp_path / "b.png").write_bytes(picture(1))
    session, other = ChatSession(engine(model), GREEDY), ChatSession(engine(model, cache=False), GREEDY)
    turns = [("what is this?", ["a.png"]), ("and these?", ["b.png", "a.png"]), ("sure?", [])]
    for text, names in turns:
        paths = [tmp_path / name for name in names]
        cached = ["".join(d.text for d in each.send(text, paths)) for each in (session, other)]
        assert cached[0] == cached[1]
    assert session.usage.cached_tokens > 0 == other.usage.cached_tokens


def test_many_images_are_forgotten_but_never_those_of_a_prompt(model, monkeypatch):
    monkeypatch.setattr("perilune.serve.images._KEPT", 2)
    shown, fresh = engine(model), engine(model, cache=False)
    for seed in range(4):
        said(shown, asked(picture(seed)))
    assert len(shown.images._rows) == 2
    three = asked(picture(0), picture(1), picture(2))
    assert said(shown, three)[0] == said(fresh, three)[0]


def test_new_weights_look_at_known_images_anew(model):
    """The tower is part of the weights; what it saw before serves nobody behind the change."""
    ours = copy.deepcopy(model)
    at, messages = engine(ours), asked(picture(0))
    said(at, messages)
    with torch.no_grad():
        ours.mm_projector.post_norm.weight.fill_(-3.0)
    at.admin.weights_changed("1")
    (image,) = at.images.load(messages)
    torch.testing.assert_close(at.images._rows_of(image), engine(ours).images._rows_of(image))
    assert said(at, messages) == (said(engine(ours), messages)[0], 0)


def test_bad_images_are_refused_with_their_place(model, tmp_path):
    shown = engine(model)
    with pytest.raises(FieldError, match=r"messages\[0\]\.content\[0\]: .*no image that can be read"):
        shown.chat(asked(b"no picture"), GREEDY)
    # A text in place of an image could name any file of this machine: it is not opened.
    with pytest.raises(RequestError, match="is an address"):
        shown.chat(asked("/etc/hostname"), GREEDY)
    with pytest.raises(RequestError, match="is an address"):
        shown.chat(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}], GREEDY
        )
    session = ChatSession(shown, GREEDY)
    with pytest.raises(RequestError, match="cannot read the image"):
        session.send("x", [tmp_path / "none.png"])
    assert session.messages == []


def test_a_model_without_a_tower_takes_text_only():
    model = init_weights(Transformer(replace(tiny(), vocab_size=TOKENIZER.vocab_size)), 0)
    blind = LocalEngine(model, TOKENIZER, name="blind")
    with pytest.raises(FieldError, match="blind has no vision tower"):
        blind.chat(asked(picture(0)), GREEDY)


def test_the_tower_can_be_warmed_up(model):
    """With a picture that nobody has shown, and of which nothing is kept."""
    images, seen = ShownImages(model, image_processor(CONFIG)), []
    hook = model.vision_tower.register_forward_hook(lambda *_: seen.append(1))
    images.warm_up()
    hook.remove()
    assert seen == [1] and not images._rows
