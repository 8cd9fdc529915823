"""One answer of a job: what of its tokens becomes text, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.model.vision import ImageRows
from perilune.serve.images import PlacedImage, rows_between
from perilune.serve.reader import Reader
from perilune.serve.request import Delta, FinishReason, SamplingParams, TokenLogprob
from perilune.serve.sampling import Drawn, Mask, SamplingRow
from perilune.tokenizer.xtml.grammar_mask import Constraint


class Answer:
    """The content of a scheduler's sequence.

    Args:
        row: which answer of its job.
        params: how it is drawn and ends.
        reader: how ids become text.
        sampling: its random numbers and counts.
        constraint: what it may still say; None = anything.
        images: of the prompt.

    Attributes:
        token_ids: drawn so far, the end token included.
        finish_reason: None while it goes on.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed.
        started, first, last: clock when its first chunk was planned, and when its first and its newest token were drawn.
    """

    def __init__(
        self,
        row: int,
        params: SamplingParams,
        reader: Reader,
        sampling: SamplingRow,
        constraint: Constraint | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        self.row, self.params, self.reader, self.sampling, self.constraint = row, params, reader, sampling, constraint
        self.images = images
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.started = self.first = self.last = 0.0
        self._fault: Exception | None = None

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether scores are needed behind every token of the prompt."""
        return self.params.prompt_logprobs is not None

    def image_rows(self, start: int, end: int) -> ImageRows | None:
        """What stands for pads among the tokens from `start` to `end`."""
        return rows_between(self.images, start, end) if self.images else None

    def mask(self) -> Mask | None:
        """Which tokens its grammar allows next; None = all of them, or it has ended and nobody asks.

        A grammar that cannot say so, for it allows nothing or costs too much, is a fault of this answer alone: what is drawn
        beside it is drawn all the same, and `take` raises.
        """
        if self.constraint is None or self.finish_reason is not None:
            return None
        try:
            return self.constraint.mask()
        except Exception as error:
            self._fault = error
            return None

    def take(self, drawn: Drawn) -> Delta | None:
        """Add a drawn token; returns what became certain with it, if anything, or the answer's end.

        Raises:
            RequestError: its grammar does not go on.
        """
        if self._fault is not None:
            raise self._fault
        token_id = drawn.token_id
        self.token_ids.append(token_id)
        if self.constraint is not None:
            self.constraint.advance(token_id)
        reader = self.reader
        piece = reader.push(token_id, drawn.logprob)
        reason: FinishReason | None = None
        if self.sampling.ended(token_id) or reader.stopped:
            reason = "stop"
        elif len(self.token_ids) >= self.params.max_tokens:
            reason = "length"
        if reason is not None:
            piece += reader.finish()
            if reader.stopped:
                reason = "stop"
            if reason == "stop" and reader.called:
                reason = "tool_calls"
        self.finish_reason = reason
        return Delta.of(self.row, piece, reason) if piece or reason is not None else None
