"""Executes plans: operations on pages, forward passes over them, exports; and gives back the scores to draw from.

Rows that decode run together, whatever their lengths, and so do chunks of prompts. What a row computes depends on its own
tokens and on where its chunks end, up to the rounding of products that have more or fewer rows. In the deterministic
mode it depends on nothing else: chunks run alone, and decoding goes in groups for which every kernel treats each row
alike, so fp32 on the CPU gives the same bits in any company.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import PagedRows, PagedState
from perilune.model.vision import ImageRows
from perilune.ops.linear import FEW_ROWS
from perilune.serve.cache import Chunk
from perilune.serve.runner.graphs import DecodeGraphs
from perilune.serve.runner.pages import PagePool
from perilune.serve.runner.recordings import DecodeRecordings
from perilune.serve.runner.rows import DecodeRows, chunk_rows
from perilune.serve.schedule import Plan, Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a step computed.

    Attributes:
        logits: scores after the last token, fp32 or wider `[Z]`, of each row that draws, by the sequence's name.
        prompt: scores after every token of a chunk `[T, Z]`, of sequences that want them.
    """

    logits: dict[str, Tensor] = field(default_factory=dict)
    prompt: dict[str, Tensor] = field(default_factory=dict)


class ModelRunner:
    """Runs a model over the pages of a pool.

    Args:
        model: in eval mode from now on; its device and compute dtype are used as they are.
        pool: of the same device and dtype.
        vocab_size: scores of ids beyond it, with which a model may be padded, are cut off.
        deterministic: decode in groups of rows whose results do not depend on each other, bit by bit.

    Attributes:
        tokens_run: tokens that went through the model in all.
    """

    def __init__(self, model: Transformer, pool: PagePool, vocab_size: int, *, deterministic: bool = False) -> None:
        self.model, self.pool, self.vocab_size = model.eval(), pool, vocab_size
        self.group = FEW_ROWS if deterministic else 1 << 30
        self.tokens_run = 0
        self._packs = not deterministic and _takes_parts(model)
        self._decoding: dict[int, DecodeRows] = {}
        self._recorded: DecodeGraphs | DecodeRecordings | None = None
        recorder = DecodeGraphs if model.device.type == "cuda" else DecodeRecordings
        reason = recorder.why_not(self.model, pool)
        if reason is None:
            self._recorded = recorder(self.model, pool)
        else:
            logger.info("decode passes are not recorded: %s", reason)

    @torch.inference_mode()
    def run(self, plan: Plan, stage: int | None = None) -> Scores:
        """Execute a step to its end, or one stage of it after the other."""
        scores = Scores()
        if not stage:
            for row in plan.rows:
                if row.chunk.operations:
                    self.pool.operate(row.chunk.operations)
            for first in range(0, len(plan.decode), self.group):
                self._decode(first, plan.decode[first : first + self.group], scores)
        for rows in plan.stages if stage is None else plan.stages[stage : stage + 1]:
            self._prefill_all(rows, scores)
        return scores

    def recorded(self, rows: int) -> torch.cuda.CUDAGraph:
        """The recording of a decode pass of so many rows that was made last: for measurements.

        Raises:
            KeyError: no such pass was recorded.
        """
        if not isinstance(self._recorded, DecodeGraphs):
            raise KeyError("decode passes of this model are not recorded as CUDA graphs")
        return self._recorded.recorded(rows)

    def _decode(self, first: int, rows: Sequence[Row], scores: Scores) -> None:
        """One token of each row; `first` tells groups apart, each of which keeps its page tables."""
        chunks = [row.chunk for row in rows]
        if first not in self._decoding:
            self._decoding[first] = DecodeRows(self.pool.geometry.page_tokens, self.model.device)
        paged, ids_B = self._decoding[first].of(chunks), [row.sequence.ids[row.chunk.start] for row in rows]
        self.tokens_run += len(rows)
        if self._recorded is None:
            logits_BZ = self._logits([[token] for token in ids_B], paged, "last")[:, 0]
        else:
            logits_BZ = self._recorded.run(ids_B, paged)[:, : self.vocab_size]
        for row, logits_Z in zip(rows, logits_BZ.unbind()):
            scores.logits[row.sequence.name] = logits_Z
        self._export_ends(chunks)

    def _prefill_all(self, rows: Sequence[Row], scores: Scores) -> None:
        """Chunks of several sequences, in one pass as far as possible."""
        together = [row for row in rows if self._packs and not _alone(row)]
        if len(together) > 1:
            self._prefill_together(together, scores)
        for row in rows:
            if len(together) < 2 or _alone(row):
                self._prefill(row, scores)

    def _prefill(self, row: Row, scores: Scores) -> None:
        """A chunk of one sequence."""
        chunk, content = row.chunk, row.sequence.content
        every = _scores_all(row)
        what = "all" if every else "last" if row.draws else "none"
        images = None if content is None else content.image_rows(chunk.start, chunk.end)
        self.tokens_run += chunk.end - chunk.start
        logits = self._logits([row.tokens], self._rows([chunk]), what, images)
        if every:
            scores.prompt[row.sequence.name] = logits[0]
        if row.draws:
            scores.logits[row.sequence.name] = logits[0, -1]
        self._export_ends([chunk])

    def _prefill_together(self, rows: Sequence[Row], scores: Scores) -> None:
        """Chunks of several sequences, of any lengths, in one pass."""
        chunks = [row.chunk for row in rows]
        packed = self._rows(chunks)
        ids = torch.tensor([[token for row in rows for token in row.tokens]], device=self.model.device)
        self.tokens_run += ids.numel()
        hidden_BTD = self.model.hidden(ids, PagedState(self.pool.layers(packed), packed))
        ends = list(itertools.accumulate(chunk.end - chunk.start for chunk in chunks))
        drawing = [(row, end - 1) for row, end in zip(rows, ends) if row.draws]
        if drawing:
            last_ND = self.model.norm(hidden_BTD[0, [place for _, place in drawing]])
            for (row, _), logits_Z in zip(drawing, self.model.lm_head(last_ND)[:, : self.vocab_size].unbind()):
                scores.logits[row.sequence.name] = logits_Z
        self._export_ends(chunks)

    def _rows(self, chunks: Sequence[Chunk]) -> PagedRows:
        return chunk_rows(chunks, self.pool.geometry.page_tokens, self.model.device)

    def _logits(
        self, ids_BT: Sequence[Sequence[int]], rows: PagedRows, what: str, images: ImageRows | None = None
    ) -> Tensor:
        """One pass over rows of equally many tokens; returns scores `[B, T or 1, Z]`, none of them with "none"."""
        ids = torch.tensor(ids_BT, device=self.model.device)
        out = self.model(ids, PagedState(self.pool.layers(rows), rows), logits=what, images=images)
        if out.logits_BTZ is None:
            return out.hidden_BTD[:, :0]
        return out.logits_BTZ[..., : self.vocab_size]

    def _export_ends(self, chunks: Sequence[Chunk]) -> None:
        """Checkpoints at the end of a chunk: the running state is what they hold, so they are copied from it."""
        sources: list[int] = []
        targets: list[int] = []
        for chunk in chunks:
            for export in chunk.exports:
                if export.position == chunk.end:
                    sources.extend(chunk.state)
                    targets.extend(export.targets)
        if targets:
            self.pool.copy(sources, targets)


def _takes_parts(model: Transformer) -> bool:
    """Whether chunks of several sequences can be in one pass: their layers know no positions."""
    mla = model.cfg.mla
    return set(model.cfg.layer_mixers) <= {"kda", "gdn", "mla"} and (mla is None or mla.rope_theta is None)


def _scores_all(row: Row) -> bool:
    """Whether the scores after every token of a chunk are asked for."""
    content = row.sequence.content
    return content is not None and content.wants_prompt_scores and row.chunk.start < row.sequence.prompt


def _alone(row: Row) -> bool:
    """Whether a chunk needs a pass of its own: for the scores of all its tokens, or for its images."""
    content = row.sequence.content
    return content is not None and (bool(content.images) or _scores_all(row))
