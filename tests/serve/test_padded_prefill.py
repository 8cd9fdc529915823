"""Prefill passes that are filled up to a size give the scores of one pass, on a CPU: what a recording would read, with the kernels
that are told by the host where chunks lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from test_float_oracle import Served, text
from tiny_model import tiny_model

from perilune.model.packing import Packing
from perilune.model.paged import PagedRows, PagedState
from perilune.ops.mla.packed import CachedChunks
from perilune.ops.packed_conv import Chunks
from perilune.serve.runner.prefill import CHUNKS, PrefillInputs, Room
from perilune.serve.runner.rows import marked


class Passes:
    """Stands in for `PrefillGraphs`: one size, and no recording."""

    failed = None

    def __init__(self, runner, room: Room, most: int) -> None:
        geometry, self.runner, self.room, self.most = runner.pool.geometry, runner, room, most
        self.size, self.ran, self.refused = geometry.page_tokens, 0, 0
        self.inputs = PrefillInputs(
            room, self.size, geometry.groups, runner.pool.spare, runner.model.device, None
        )  # fmt: skip

    def room_for(self, chunks):
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        pages = sum(-(-chunk.end // self.size) for chunk in chunks) + -(-(self.room.tokens - tokens) // self.size)
        fits = len(chunks) <= self.most and tokens <= self.room.tokens and pages <= self.room.pages
        return self.room if fits else None

    def run(self, rows):
        chunks = [row.chunk for row in rows]
        if self.room_for(chunks) is None:
            self.refused += 1
            return None
        self.ran += 1
        self.inputs.fill(chunks, [row.tokens for row in rows])
        paged, model = self.told(self.inputs.rows(), chunks), self.runner.model
        hidden_BTD = model.hidden(self.inputs.ids_1T, PagedState(self.runner.pool.layers(paged), paged))
        return model.lm_head(model.norm(hidden_BTD[0, self.inputs.ends_N]))[: len(rows)]

    def told(self, paged: PagedRows, chunks) -> PagedRows:
        """The same rows for kernels that read lists."""
        lengths = [chunk.end - chunk.start for chunk in chunks]
        past, left = [chunk.start for chunk in chunks], self.room.tokens - sum(lengths)
        if left:
            lengths, past = [*lengths, left], [*past, 0]
        marks = [(n, export.position - chunks[n].start) for n, export in marked(chunks)]
        offsets = tuple(accumulate(lengths, initial=0))
        rooms = [-(-(a + b) // self.size) * self.size for a, b in zip(lengths, past)]
        known, count = paged.packing, len(lengths)
        assert known is not None and paged.mark_GM is not None
        packing = Packing(
            Chunks(
                offsets, (*enumerate(lengths), *marks), known.chunks.chunk_T, known.chunks.since_T,
                known.chunks.begin_N[:count], known.chunks.point_chunk_M, known.chunks.point_tokens_M,
            ),
            CachedChunks(
                offsets, tuple(past), tuple(accumulate(rooms, initial=0))[:-1], known.cached.first_T, known.cached.last_T
            ),
            known.last_N,
            known.beyond_NS,
        )  # fmt: skip
        return replace(
            paged, state_GB=paged.state_GB[:, :count], mark_GM=paged.mark_GM[:, : len(marks)], packing=packing
        )


@pytest.mark.parametrize("most", [1, 3, CHUNKS - 1])
@torch.inference_mode()
def test_filled_up_passes_give_the_scores_of_one_pass(most: int):
    """Prompts of all lengths, behind hits and chunks, with states inside; more of them than a pass takes."""
    model = tiny_model()
    served = Served(model, step_tokens=150, chunk=70, retention="turns+second-hit+interval:12")
    passes = served.runner.prefill_graphs = Passes(served.runner, Room(160, 40), most)
    base = text(100)
    prompts = [text(1), text(7, 1), base, base[:41] + text(9, 2), text(66, 3), text(23, 4)]
    for _ in range(2):
        sequences = [served.add(prompt, tokens=3, turn_ends=[len(prompt) // 2]) for prompt in prompts]
        served.serve()
        assert max(map(served.error, sequences)) < 1e-9
    assert sum(sequence.resume > 0 for sequence in sequences) >= 4
    assert passes.ran > 1 and (passes.refused > 0) == (most < 6)


@torch.inference_mode()
def test_what_no_size_holds_runs_as_it_is():
    model = tiny_model()
    served = Served(model, step_tokens=300, chunk=300)
    passes = served.runner.prefill_graphs = Passes(served.runner, Room(64, 40), 4)
    sequences = [served.add(text(length, length), tokens=2) for length in (200, 30, 20)]
    served.serve()
    assert max(map(served.error, sequences)) < 1e-9 and passes.refused > 0
