"""From a drawn picture to tokens: the framing of the picture, and text of which only the answer is trained on.

    caption   <|media_begin|>image 120x90<|media_content|><|media_pad|>…<|media_end|>a red circle[EOS]
    chat      a user's message with the picture and a question, then the assistant's message with the answer

Width and height in the framing are those of the picture before it is scaled (architecture §8.8). Framing, media pads and
question are given, not predicted: the loss is on the answer and on what ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perilune.data.drawn.drawing import Drawing, Question
from perilune.data.image import ImageProcessor, ProcessedImage
from perilune.data.order import hash_integers
from perilune.data.packing import IGNORE, PlacedImage
from perilune.tokenizer import Tokenizer
from perilune.tokenizer.xtml import Image, ImageSize, encode_segments, expand, render


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """Tokens around one picture.

    Attributes:
        ids: int64 `[n]`.
        targets: int64 `[n]`, the next token where it belongs to the answer, else -100.
        image: where the picture's media pads are, and what the tower gets.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    image: PlacedImage


class DocumentWriter:
    """Writes documents with a run's tokenizer and image processor.

    Args:
        tokenizer: with media tokens.
        processor: as the model's vision settings need it.
        chat: share of the documents in the form of a chat, in [0, 1].
    """

    def __init__(self, tokenizer: Tokenizer, processor: ImageProcessor, *, chat: float) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.chat = chat
        # A few sizes and captions come again and again; looking them up is cheaper than encoding them.
        self._encoded = lru_cache(4096)(tokenizer.encode)
        self._framing = lru_cache(4096)(self._framed)

    def document(self, drawing: Drawing, room: int) -> ImageDocument | None:
        """The form that the picture's number decides, or the caption if that is too long; None if that is too long too.

        Args:
            drawing: a picture.
            room: tokens that there are for it.
        """
        image = self.processor.process(drawing.image)
        choice = hash_integers([drawing.index, 1])
        if choice % 1000 < 1000 * self.chat:
            written = self.answered(image, self._question(drawing, choice // 1000))
            if len(written.ids) <= room:
                return written
        written = self.captioned(image, drawing.captions[choice // 1000 % len(drawing.captions)])
        return written if len(written.ids) <= room else None

    def captioned(self, image: ProcessedImage, caption: str) -> ImageDocument:
        """A picture and its caption."""
        given = self.caption_prompt(image)
        answer = [*self._encoded(caption), self.tokenizer.special.eos]
        written = np.arange(len(given.ids) + len(answer)) >= len(given.ids)
        return _document(np.concatenate([given.ids, answer]), written, given.image)

    def answered(self, image: ProcessedImage, question: Question) -> ImageDocument:
        """A chat in which the picture is sent with a question, and answered."""
        messages = [_sent(question.text), {"role": "assistant", "content": question.answer}]
        return self._rendered(image, messages, add_generation_prompt=False)

    def caption_prompt(self, image: ProcessedImage) -> ImageDocument:
        """A picture behind which a caption is to follow; no targets."""
        ids = np.array(self._framing(_size(image)))
        first = int(np.flatnonzero(ids == self.tokenizer.special.ids["<|media_pad|>"])[0])
        return _document(ids, np.zeros(len(ids), dtype=np.bool_), PlacedImage(first, image))

    def _framed(self, size: ImageSize) -> list[int]:
        """Ids that stand for a picture."""
        return encode_segments(self.tokenizer, expand([Image(0)], images=[size]))

    def chat_prompt(self, image: ProcessedImage, question: str) -> ImageDocument:
        """A chat in which the picture was sent with a question, up to the answer; no targets."""
        return self._rendered(image, [_sent(question)], add_generation_prompt=True)

    def _rendered(
        self, image: ProcessedImage, messages: list[dict[str, Any]], *, add_generation_prompt: bool
    ) -> ImageDocument:
        prompt = render(
            self.tokenizer, messages, thinking=False, images=[_size(image)], add_generation_prompt=add_generation_prompt
        )
        return _document(np.array(prompt.ids), np.array(prompt.loss_mask), PlacedImage(prompt.media[0].start, image))

    def _question(self, drawing: Drawing, choice: int) -> Question:
        """Everything that can be asked comes equally often, in any of its wordings."""
        subjects = list(dict.fromkeys(question.about for question in drawing.questions))
        about = subjects[choice % len(subjects)]
        wordings = [question for question in drawing.questions if question.about == about]
        return wordings[choice // len(subjects) % len(wordings)]


def _size(image: ProcessedImage) -> ImageSize:
    return ImageSize(*image.original_size, image.tokens)


def _sent(question: str) -> dict[str, Any]:
    """A user's message: the picture, then the question."""
    return {"role": "user", "content": [{"type": "image", "image": True}, {"type": "text", "text": question}]}


def _document(ids: NDArray[np.int64], written: NDArray[np.bool_], image: PlacedImage) -> ImageDocument:
    """Targets are the next tokens where those are `written`."""
    targets = np.full_like(ids, IGNORE)
    targets[:-1] = np.where(written[1:], ids[1:], IGNORE)
    return ImageDocument(ids, targets, image)
