"""Executes plans: operations on pages, forward passes over them, exports; and gives back the scores to draw from.

Rows that decode run together, whatever their lengths; a chunk of a prompt runs alone. So what a row computes depends on
its own tokens and on where its chunks end, and in the deterministic mode, where decoding goes in groups for which every
kernel treats each row alike, on nothing else: fp32 on the CPU gives the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import Mark, PagedRows, PagedState
from perilune.model.vision import ImageRows
from perilune.ops.linear import FEW_ROWS
from perilune.serve.cache import Chunk
from perilune.serve.runner.graphs import DecodeGraphs
from perilune.serve.runner.pages import PagePool
from perilune.serve.schedule import Plan, Row


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
        self._tables = _Tables(pool.geometry.page_tokens)
        self._graphs = DecodeGraphs(self.model, pool) if DecodeGraphs.why_not(self.model, pool) is None else None

    @torch.inference_mode()
    def run(self, plan: Plan) -> Scores:
        """Execute a step to its end."""
        scores = Scores()
        for row in plan.rows:
            self.pool.operate(row.chunk.operations)
        for first in range(0, len(plan.decode), self.group):
            self._decode(plan.decode[first : first + self.group], scores)
        for row in plan.prefill:
            self._prefill(row, scores)
        return scores

    def forget(self, name: str) -> None:
        """A sequence has ended."""
        self._tables.drop(name)

    def recorded(self, rows: int) -> torch.cuda.CUDAGraph:
        """The recording of a decode pass of so many rows that was made last: for measurements.

        Raises:
            KeyError: no such pass was recorded.
        """
        if self._graphs is None:
            raise KeyError("decode passes of this model are not recorded")
        return self._graphs.recorded(rows)

    def _decode(self, rows: Sequence[Row], scores: Scores) -> None:
        chunks = [row.chunk for row in rows]
        if self._graphs is None:
            logits_BZ = self._forward([row.tokens for row in rows], chunks, (), "last")[:, 0]
        else:
            ids_B = [row.tokens[0] for row in rows]
            self.tokens_run += len(ids_B)
            paged = self._tables.rows(chunks, (), self.model.device)
            logits_BZ = self._graphs.run(ids_B, paged)[:, : self.vocab_size]
        for row, logits_Z in zip(rows, logits_BZ):
            scores.logits[row.sequence.name] = logits_Z
        self._export_ends(chunks)

    def _prefill(self, row: Row, scores: Scores) -> None:
        chunk, content = row.chunk, row.sequence.content
        marks = tuple(Mark(e.position - chunk.start, e.targets) for e in chunk.exports if e.position < chunk.end)
        every = content is not None and content.wants_prompt_scores and chunk.start < row.sequence.prompt
        what = "all" if every else "last" if row.draws else "none"
        images = None if content is None else content.image_rows(chunk.start, chunk.end)
        logits = self._forward([row.tokens], [chunk], marks, what, images)
        if every:
            scores.prompt[row.sequence.name] = logits[0]
        if row.draws:
            scores.logits[row.sequence.name] = logits[0, -1]
        self._export_ends([chunk])

    def _forward(
        self,
        ids_BT: Sequence[Sequence[int]],
        chunks: Sequence[Chunk],
        marks: tuple[Mark, ...],
        logits: str,
        images: ImageRows | None = None,
    ) -> Tensor:
        """One pass over rows of equally many tokens; returns scores `[B, T or 1, Z]`, none of them with logits="none"."""
        device = self.model.device
        rows = self._tables.rows(chunks, marks, device)
        ids = torch.tensor(ids_BT, device=device)
        self.tokens_run += ids.numel()
        out = self.model(ids, PagedState(self.pool.layers(rows), rows), logits=logits, images=images)
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


class _Tables:
    """Page tables of the sequences as arrays that only grow: a step adds the pages that are new."""

    def __init__(self, page_tokens: int) -> None:
        self._size = page_tokens
        self._rows: dict[str, tuple[np.ndarray, int, Sequence[int]]] = {}

    def drop(self, name: str) -> None:
        """Forget a sequence."""
        self._rows.pop(name, None)

    def _table(self, chunk: Chunk) -> np.ndarray:
        """Pages of a chunk's sequence. One that was preempted comes back with another list, which is read anew."""
        row, known, pages = self._rows.get(chunk.request, (np.zeros(8, dtype=np.int64), 0, chunk.pages))
        if pages is not chunk.pages:
            known = 0
        count = len(chunk.pages)
        if count > len(row):
            row = np.concatenate((row, np.zeros(max(count, len(row)), dtype=np.int64)))
        if count > known:
            row[known:count] = chunk.pages[known:]
        self._rows[chunk.request] = (row, count, chunk.pages)
        return row

    def rows(self, chunks: Sequence[Chunk], marks: tuple[Mark, ...], device: torch.device) -> PagedRows:
        """Everything that the layers need to know of where the rows lie, built once a forward pass."""
        size = self._size
        tables = [self._table(chunk) for chunk in chunks]
        past = [chunk.start for chunk in chunks]
        if len(chunks) == 1:
            positions = np.arange(chunks[0].start, chunks[0].end)
            pages, slots = tables[0][positions // size], positions % size
        else:
            ends = np.array(past)
            pages = np.array([table[start // size] for table, start in zip(tables, past)], dtype=np.int64)
            slots = ends % size
        most = -(-max(chunk.end for chunk in chunks) // size)
        table_BP = np.zeros((len(chunks), most), dtype=np.int64)
        for index, (chunk, table) in enumerate(zip(chunks, tables)):
            count = -(-chunk.end // size)
            table_BP[index, :count] = table[:count]
        return PagedRows(
            past=past,
            page_N=_tensor(pages, device),
            slot_N=_tensor(slots, device),
            table_BP=_tensor(table_BP, device),
            length_B=_tensor(np.array([chunk.end for chunk in chunks], dtype=np.int64), device),
            state_GB=_tensor(np.array([chunk.state for chunk in chunks], dtype=np.int64).T.copy(), device),
            marks=marks,
        )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
