"""Prefill and decode over a `ModelState`: a batch of answers, token by token, with what each token cost.

    prompt ── forward, in chunks ──► state, logits ── draw ──► id ── forward ──► logits ── draw ──► …

Rows may have prompts of different lengths; each is prefilled on its own and they are decoded together. A row may start
from a kept state: the tokens that the state already holds are not run again. Every token that goes through the model is
counted where it goes through, in `Generator.forward`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from perilune.model import ModelState, Transformer
from perilune.model.vision import ImageRows
from perilune.serve.images import ShownImages
from perilune.serve.reader import Reader, TextReader
from perilune.serve.request import Delta, FieldError, FinishReason, SamplingParams, Usage
from perilune.serve.sampling import Sampler, allowed_only
from perilune.tokenizer import Tokenizer
from perilune.tokenizer.xtml.grammar_mask import Constraint


@dataclass
class Prefix:
    """A prompt that has gone through the model.

    Attributes:
        ids: its tokens.
        state: after the last of them.
        logits_1Z: scores of the next token.
        run: how many of the tokens were run to get here; the others were in a kept state.
    """

    ids: list[int]
    state: ModelState
    logits_1Z: Tensor
    run: int


@dataclass
class Answer:
    """One row of a batch.

    Attributes:
        token_ids: drawn so far, the end token included.
        constraint: what the row may still say; None = anything.
        finish_reason: None while the row goes on.
        state: after the prompt and all drawn tokens but the last; set when the row ends, if states are kept.
    """

    index: int
    params: SamplingParams
    reader: Reader
    constraint: Constraint | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    state: ModelState | None = None

    @property
    def text(self) -> str:
        """Text released so far (of a chat message: its response)."""
        return self.reader.text


class Generator:
    """Runs a model for generation.

    Args:
        model: in eval mode from now on; its device and compute dtype are used as they are.
        tokenizer: of the same run.
        prefill_chunk: most prompt tokens in one forward pass.
        images: what ids below zero show; None = the model takes no images.

    Attributes:
        tokens_run: tokens that went through the model in all.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        prefill_chunk: int = 512,
        images: ShownImages | None = None,
    ) -> None:
        assert prefill_chunk > 0, f"prefill_chunk={prefill_chunk}"
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.images = images
        self.tokens_run = 0
        special = tokenizer.special
        self._ends = frozenset((special.eos, special.end_of_msg))

    @torch.inference_mode()
    def forward(self, ids_BT: Sequence[Sequence[int]], state: ModelState, images: ImageRows | None = None) -> Tensor:
        """Run `[B, T]` ids after `state`, which is advanced; returns the scores after the last, `[B, Z]`.

        `images` are the rows for some of the positions. Z is the tokenizer's vocabulary: ids with which a model was padded beyond it mean nothing and are never drawn.
        """
        rows = torch.tensor(ids_BT, device=self.model.device)
        self.tokens_run += rows.numel()
        logits = self.model(rows, state, logits="last", images=images).logits_BTZ
        assert logits is not None, "logits were asked for"
        return logits[:, -1, : self.tokenizer.vocab_size]

    def prefill(self, ids: Sequence[int], start: Prefix | None = None) -> Prefix:
        """Run a prompt.

        Args:
            ids: the whole prompt; ids below zero stand for rows of images.
            start: a prompt that `ids` begins with; only the rest is run, and its state is advanced, not copied.

        Raises:
            FieldError: the prompt is empty.
        """
        ids = list(ids)
        if not ids:
            raise FieldError("the prompt is empty; give at least one token of text", "prompt")
        assert start is None or ids[: len(start.ids)] == start.ids, "the kept prompt is not a prefix of this one"
        before = self.tokens_run
        done = len(start.ids) if start else 0
        state = start.state if start else self._new_state()
        with torch.inference_mode():
            # Powers of two, so that caches of different prompts have few sizes and can be joined.
            state.reserve(max(64, 1 << len(ids).bit_length()))
        logits = start.logits_1Z if start else None
        for at in range(done, len(ids), self.prefill_chunk):
            logits = self._run_chunk(ids[at : at + self.prefill_chunk], state)
        assert logits is not None and state.length == len(ids), f"{state.lengths} tokens in the state of {len(ids)}"
        return Prefix(ids, state, logits, self.tokens_run - before)

    def _run_chunk(self, ids: list[int], state: ModelState) -> Tensor:
        if min(ids) >= 0:
            return self.forward([ids], state)
        assert self.images is not None, "ids below zero need images"
        pad = self.tokenizer.special.ids["<|media_pad|>"]
        return self.forward([[token if token >= 0 else pad for token in ids]], state, self.images.rows(ids))

    @torch.inference_mode()
    def copy(self, prefix: Prefix) -> Prefix:
        """An independent copy, with nothing run."""
        return Prefix(list(prefix.ids), prefix.state.clone(), prefix.logits_1Z.clone(), 0)

    @torch.inference_mode()
    def _new_state(self) -> ModelState:
        return self.model.new_state(1, capacity=64)

    def start(
        self,
        prompts: Sequence[Prefix],
        params: Sequence[SamplingParams],
        *,
        readers: Sequence[Reader] | None = None,
        constraints: Sequence[Constraint | None] | None = None,
        stream: Sequence[int] | None = None,
        keep_states: bool = False,
    ) -> Generation:
        """Begin to decode prefilled prompts together; their states are used up (with one row) or copied.

        Args:
            prompts: one a row; the same `Prefix` may stand in several rows.
            params: one a row.
            readers: how ids become text; default: plain text.
            constraints: what each row may say; None = anything.
            stream: number added to the seed of each row.
            keep_states: leave the state of a finished row in `Answer.state`.
        """
        assert len(prompts) == len(params), f"{len(prompts)} prompts, {len(params)} params"
        if readers is None:
            readers = [TextReader(self.tokenizer, p.stop) for p in params]
        if constraints is None:
            constraints = [None] * len(params)
        answers = [Answer(index, *row) for index, row in enumerate(zip(params, readers, constraints, strict=True))]
        distinct = {id(prompt): prompt for prompt in prompts}.values()
        prompt_tokens = sum(len(prompt.ids) for prompt in distinct)
        usage = Usage(prompt_tokens, prompt_tokens - sum(prompt.run for prompt in distinct))
        with torch.inference_mode():
            state = prompts[0].state if len(prompts) == 1 else ModelState.stack([p.state for p in prompts])
            logits = torch.cat([p.logits_1Z for p in prompts])
        return Generation(self, answers, usage, state, logits, Sampler(params, stream), keep_states)

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """Prefill and decode a batch to its end; returns one answer a prompt."""
        generation = self.start([self.prefill(ids) for ids in prompts], params)
        for _ in generation:
            pass
        return generation.answers


class Generation:
    """A batch that is being decoded; iterating yields the text as it becomes certain.

    Attributes:
        answers: all rows, in the order of the prompts.
        seconds: time spent in steps so far: drawing, decoding and text, without prefill.
    """

    def __init__(
        self,
        generator: Generator,
        answers: list[Answer],
        prompt_usage: Usage,
        state: ModelState,
        logits_BZ: Tensor,
        sampler: Sampler,
        keep_states: bool,
    ) -> None:
        self.answers = answers
        self.seconds = 0.0
        self._generator = generator
        self._prompt_usage = prompt_usage
        self._active = list(answers)
        self._state = state
        self._logits: Tensor | None = logits_BZ
        self._sampler = sampler
        self._keep_states = keep_states

    def __iter__(self) -> Iterator[Delta]:
        while self._active:
            yield from self.step()

    @property
    def usage(self) -> Usage:
        """Counts so far; a prompt that several rows share counts once."""
        return replace(self._prompt_usage, completion_tokens=sum(len(a.token_ids) for a in self.answers))

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens of all rows a second of decoding."""
        return sum(len(a.token_ids) for a in self.answers) / self.seconds if self.seconds else 0.0

    def step(self) -> list[Delta]:
        """Draw one token for every unfinished row; returns the new text, and the end of rows that end here."""
        began = time.perf_counter()
        logits = self._logits
        if logits is None:
            logits = self._generator.forward([[answer.token_ids[-1]] for answer in self._active], self._state)
        self._logits = None
        logits = allowed_only(logits, [None if a.constraint is None else a.constraint.mask() for a in self._active])
        deltas = []
        for answer, token_id in zip(self._active, self._sampler.draw(logits)):
            answer.token_ids.append(token_id)
            if answer.constraint is not None:
                answer.constraint.advance(token_id)
            piece = answer.reader.push(token_id)
            answer.finish_reason = self._end(answer, token_id)
            if answer.finish_reason is not None:
                if not answer.reader.stopped:
                    piece += answer.reader.finish()
                if answer.reader.stopped:
                    answer.finish_reason = "stop"
                if answer.finish_reason == "stop" and answer.reader.called:
                    answer.finish_reason = "tool_calls"
            if piece or answer.finish_reason is not None:
                deltas.append(Delta(answer.index, piece.text, answer.finish_reason, piece.reasoning, piece.calls))
        if any(answer.finish_reason is not None for answer in self._active):
            self._drop_finished()
        self.seconds += time.perf_counter() - began
        return deltas

    def _end(self, answer: Answer, token_id: int) -> FinishReason | None:
        if token_id in self._generator._ends or token_id in answer.params.stop_ids or answer.reader.stopped:
            return "stop"
        return "length" if len(answer.token_ids) >= answer.params.max_tokens else None

    @torch.inference_mode()
    def _drop_finished(self) -> None:
        alone = len(self._active) == 1
        if self._keep_states:
            for row, answer in enumerate(self._active):
                if answer.finish_reason is not None:
                    answer.state = self._state if alone else self._state.select([row])
        left = [row for row, answer in enumerate(self._active) if answer.finish_reason is None]
        self._active = [self._active[row] for row in left]
        if left:
            self._state = self._state.select(left)
            self._sampler.keep(left)
