"""How well a model answers questions about pictures that it never saw.

Every question is asked in the chat format and answered twice: *generated* is the most likely text, which counts if it is
the right answer letter by letter; *scored* is the likeliest of the possible answers, each with the token that ends it.
Two baselines: chance, and *blind*, the same answers marked against the next picture's question, which is what the model
would get if every picture were replaced by another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.config import TrainConfig
from perilune.data.drawn import Catalogue, DocumentWriter, Drawing, ImageDocument, kinds
from perilune.data.drawn.canvas import COLOURS
from perilune.data.drawn.objects import SHAPES, with_article
from perilune.data.image_input import image_processor
from perilune.data.packing import IGNORE
from perilune.errors import RequestError
from perilune.eval.heldout import load_for_eval
from perilune.eval.intervals import Share
from perilune.model.state import ModelState
from perilune.model.transformer import Transformer
from perilune.model.vision import ImageBatch
from perilune.tokenizer import Tokenizer

PARTS = ("held_out", "unseen")
BATCH = 64
MAX_ANSWER = 24
"""Tokens after which a generated answer is cut."""

CANDIDATES: dict[str, tuple[str, ...]] = {
    "shape": tuple(with_article(shape) for shape in SHAPES),
    "colour": tuple(COLOURS),
}
"""The possible answers by what is asked, where there are few."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered.

    Attributes:
        generated: the most likely text, token by token.
        best: the likeliest candidate; None if there were no candidates.
    """

    generated: str
    best: str | None


@dataclass(frozen=True, slots=True)
class Exam:
    """The answers to one question about many pictures.

    Attributes:
        kind, part, about: of the pictures and the question.
        drawings: the pictures.
        question: its wording.
        right: the right answer for each.
        replies: the model's.
        candidates: the possible answers; empty where they are many.
    """

    kind: str
    part: str
    about: str
    drawings: tuple[Drawing, ...]
    question: str
    right: tuple[str, ...]
    replies: tuple[Reply, ...]
    candidates: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Shares of right answers, and what to compare them with."""
        result: dict[str, Any] = {"question": self.question}
        for name, texts in (
            ("generated", [r.generated for r in self.replies]),
            ("scored", [r.best for r in self.replies]),
        ):
            if name == "scored" and not self.candidates:
                continue
            others = texts[-1:] + texts[:-1]
            result[name] = self._marked(texts)
            result[f"blind_{name}"] = self._marked(others)
        return result | ({"chance": 1 / len(self.candidates)} if self.candidates else {})

    def _marked(self, texts: Sequence[str | None]) -> dict[str, Any]:
        hits = sum(text == right for text, right in zip(texts, self.right, strict=True))
        return Share(hits, len(self.right)).as_json()


def examine(
    model: Transformer, tokenizer: Tokenizer, config: TrainConfig, *, pictures: int = 200, seed: int = 0
) -> list[Exam]:
    """Ask about new pictures of every kind that the run was trained on.

    Args:
        model: put into evaluation mode for this and back.
        tokenizer, config: of the run.
        pictures: of each kind and part.
        seed: of the pictures; they are in no run's training part, whatever its seed.

    Raises:
        RequestError: the run was not trained on pictures.
    """
    vision = config.data.vision
    if vision.share == 0.0:
        raise RequestError("this run was not trained on pictures (data.vision.share is 0), so there is nothing to ask")
    writer = DocumentWriter(tokenizer, image_processor(config), chat=1.0)
    exams = []
    for kind in dict.fromkeys(kinds(vision.kinds)):
        for part in PARTS:
            catalogue = Catalogue((kind,), vision.image_size, seed)
            if part == "unseen" and not kind.combination(catalogue.draw(0).attributes):
                continue
            drawings = [catalogue.draw(index, part) for index in range(pictures)]
            exams += [_exam(model, writer, drawings, about) for about in _subjects(drawings)]
    return exams


def table(exams: Sequence[Exam]) -> dict[str, dict[str, Any]]:
    """Shares of right answers by part, then by what was asked; kinds other than `shape` stand before it with a dot."""
    result: dict[str, dict[str, Any]] = {}
    for exam in exams:
        about = exam.about if exam.kind == "shape" else f"{exam.kind}.{exam.about}"
        result.setdefault(exam.part, {})[about] = exam.as_json()
    return result


def examine_run(
    name_or_path: str | Path, *, step: int | None = None, pictures: int = 200, device: str | None = None
) -> dict[str, dict[str, Any]]:
    """Ask a run's checkpoint about new pictures.

    Args:
        name_or_path, step, device: see `heldout.evaluate_run`.
        pictures: of each kind and part.

    Returns:
        As `table`.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged.
        RequestError: the run was not trained on pictures.
    """
    loaded = load_for_eval(name_or_path, step, device)
    return table(examine(loaded.model, loaded.tokenizer, loaded.config, pictures=pictures))


def _subjects(drawings: Sequence[Drawing]) -> list[str]:
    """What can be asked about every one of the pictures."""
    common = set.intersection(*({question.about for question in drawing.questions} for drawing in drawings))
    return list(dict.fromkeys(q.about for q in drawings[0].questions if q.about in common))


def _exam(model: Transformer, writer: DocumentWriter, drawings: Sequence[Drawing], about: str) -> Exam:
    asked = [next(q for q in drawing.questions if q.about == about) for drawing in drawings]
    candidates = CANDIDATES.get(about, ())
    prompts = [
        writer.chat_prompt(writer.processor.process(drawing.image), question.text)
        for drawing, question in zip(drawings, asked, strict=True)
    ]
    replies = answer(model, writer.tokenizer, prompts, candidates)
    return Exam(drawings[0].kind, drawings[0].part, about, tuple(drawings), asked[0].text,
                tuple(q.answer for q in asked), tuple(replies), candidates)  # fmt: skip


@torch.no_grad()
def answer(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[ImageDocument], candidates: Sequence[str] = ()
) -> list[Reply]:
    """Answer prompts with pictures, those of equal length together.

    Args:
        model: put into evaluation mode for this and back.
        tokenizer: of the same run.
        prompts: up to where the answer begins.
        candidates: answers to choose from; empty = generate only.
    """
    was_training = model.training
    model.eval()
    replies: dict[int, Reply] = {}
    try:
        for rows in _batches(prompts):
            group = [prompts[row] for row in rows]
            state, last = _prefilled(model, group)
            best = _likeliest(model, tokenizer, state, last, candidates) if candidates else [None] * len(rows)
            generated = _generated(model, tokenizer, state, last)
            replies |= {row: Reply(*pair) for row, pair in zip(rows, zip(generated, best, strict=True), strict=True)}
    finally:
        model.train(was_training)
    return [replies[row] for row in range(len(prompts))]


def _batches(prompts: Sequence[ImageDocument]) -> Iterator[list[int]]:
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        by_length[len(prompt.ids)].append(row)
    for rows in by_length.values():
        for first in range(0, len(rows), BATCH):
            yield rows[first : first + BATCH]


def _prefilled(model: Transformer, prompts: Sequence[ImageDocument]) -> tuple[ModelState, Tensor]:
    """State after all tokens but the last of each prompt, and those last tokens `[B, 1]`."""
    ids = torch.stack([torch.from_numpy(prompt.ids) for prompt in prompts]).to(model.device)
    length = ids.shape[1] - 1
    positions = torch.cat([
        row * length + prompt.image.position + torch.arange(prompt.image.image.tokens) for row, prompt in enumerate(prompts)
    ])  # fmt: skip
    images = ImageBatch.collate([prompt.image.image for prompt in prompts], positions).to(model.device)
    state = model.new_state(len(prompts), capacity=length + MAX_ANSWER)
    model(ids[:, :-1], state, logits="none", images=images)
    return state, ids[:, -1:]


def _generated(model: Transformer, tokenizer: Tokenizer, state: ModelState, last_B1: Tensor) -> list[str]:
    """The most likely answers, token by token up to a control token; the state is used up."""
    drawn: list[list[int]] = [[] for _ in range(len(last_B1))]
    open_rows = set(range(len(drawn)))
    while open_rows and max(map(len, drawn)) < MAX_ANSWER:
        logits = model(last_B1, state, logits="last").logits_BTZ
        assert logits is not None, "logits were asked for"
        last_B1 = logits[:, -1, : tokenizer.vocab_size].argmax(-1, keepdim=True)
        for row in sorted(open_rows):
            token = int(last_B1[row])
            if token in tokenizer.special:
                open_rows.discard(row)
            else:
                drawn[row].append(token)
    return [tokenizer.decode(ids) for ids in drawn]


def _likeliest(
    model: Transformer, tokenizer: Tokenizer, state: ModelState, last_B1: Tensor, candidates: Sequence[str]
) -> Sequence[str]:
    """Of each row the candidate whose tokens, the tag behind it included, are likeliest together."""
    endings = [[*ids, tokenizer.special.close] for ids in tokenizer.encode_batch(list(candidates))]
    count, width, rows = len(endings), max(map(len, endings)), len(last_B1)
    ids = torch.zeros(count, width, dtype=torch.int64)
    targets = torch.full((count, width), IGNORE)
    for number, ending in enumerate(endings):
        targets[number, : len(ending)] = torch.tensor(ending)
        ids[number, 1 : len(ending)] = torch.tensor(ending[:-1])
    ids, targets = (each.repeat(rows, 1).to(model.device) for each in (ids, targets))
    ids[:, 0] = last_B1.flatten().repeat_interleave(count)
    forked = state.select([row for row in range(rows) for _ in range(count)])
    nats = model.token_nats(ids, targets, forked).double().sum(-1).view(rows, count)
    return [candidates[int(choice)] for choice in nats.argmin(-1)]
