"""Decode passes recorded as CUDA graphs: a step of a few hundred kernels is one launch.

Everything a pass over paged rows needs to know lies in tensors, so a recording of it serves any rows: it reads their
description where `DecodeInputs` keeps it, and their page tables from a copy of its own. There is a recording for some
numbers of rows and some of pages; a pass with fewer is filled up to the next one. Recordings share their memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import PagedRecurrent, PagedRows, PagedState
from perilune.ops.cuda.graph import record_graph, warm_up
from perilune.ops.first_use import tell
from perilune.ops.kda.decode_pages import select as select_kda
from perilune.ops.mla.kernel_choice import PAGE
from perilune.serve.runner.inputs import STATE, DecodeInputs
from perilune.serve.runner.pages import PagePool

MOST = 512  # recordings that are kept
SIZES = (*range(1, 9), *range(12, 33, 4), *range(40, 65, 8), *range(80, 1025, 16))  # rows of a recording


def rows_of_room(rows: int) -> int:
    """Rows of the recording that serves so many."""
    return next((size for size in SIZES if size >= rows), rows)


def widths_up_to(pages: int) -> list[int]:
    """Widths of the tables in recordings that serve sequences of up to so many pages: powers of four."""
    widths = [4]
    while widths[-1] < pages:
        widths.append(4 * widths[-1])
    return widths


@dataclass(slots=True)
class _Recording:
    """A recorded pass; `tables` is what its own tables were copied from."""

    graph: torch.cuda.CUDAGraph
    rows: PagedRows
    logits_BZ: Tensor
    tables: Tensor


def obstacle(model: Transformer, pool: PagePool) -> str | None:
    """Why no pass of a model over a pool can be recorded, of whatever kind; None if nothing is known."""
    if model.device.type != "cuda":
        return f"CUDA graphs are recorded on CUDA devices, not on {model.device.type}"
    others = sorted(set(model.cfg.layer_mixers) - {"kda", "mla"})
    if others:
        return f"layers of kind {', '.join(others)} ask the host"
    if model.cfg.mla is not None and model.cfg.mla.rope_theta is not None:
        return "rotated positions come from the host"
    if pool.geometry.attention_layers and pool.geometry.page_tokens % PAGE:
        return f"pages of {pool.geometry.page_tokens} tokens are not a multiple of the {PAGE} that the kernels read"
    return None


class DecodeGraphs:
    """Decoding by recordings.

    Args:
        model: in eval mode, on a CUDA device.
        pool: its pages.
        inputs: where the rows of a pass are described.
        memory: of all recordings of which one runs at a time.
    """

    def __init__(self, model: Transformer, pool: PagePool, inputs: DecodeInputs, memory: tuple[int, int]) -> None:
        self.model, self.pool, self.inputs = model, pool, inputs
        self._recordings: OrderedDict[tuple[int, int], _Recording] = OrderedDict()
        self._memory = memory

    @staticmethod
    def why_not(model: Transformer, pool: PagePool) -> str | None:
        """Why the decode passes of a model cannot be recorded; None if they can."""
        reason = obstacle(model, pool)
        if reason is not None:
            return reason
        empty = torch.zeros(1, 0, dtype=torch.int64, device=model.device)
        rows = PagedRows([0], empty[0], empty[0], empty, empty[0], empty.expand(pool.geometry.groups, 0))
        token = torch.empty(1, 1, dtype=model.compute_dtype, device=model.device)
        for layer in pool.layers(rows):
            if isinstance(layer, PagedRecurrent):
                choice = select_kda(token, layer.window_PHw, layer.memory_PHVK)
                return None if choice.implementation == "cuda" else choice.reason
        return None

    @staticmethod
    def room(rows: int, pages: int) -> tuple[int, int]:
        """Rows of a pass, and the width of its tables, for so many rows with at most so many pages."""
        return rows_of_room(rows), widths_up_to(pages)[-1]

    def ready(self, rows: PagedRows) -> _Recording:
        """The recording for these rows, made now if there is none."""
        key = batch, width = tuple(rows.table_BP.shape)
        if key not in self._recordings:
            began = time.perf_counter()
            self._recordings[key] = self._record(rows)
            tell(f"recorded decoding of {batch} rows of up to {width} pages", time.perf_counter() - began)
            if len(self._recordings) > MOST:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def run(self, rows: PagedRows) -> Tensor:
        """Scores `[B, Z]` after one more token of each row in `inputs`; the rows' states and caches are advanced."""
        recording = self.ready(rows)
        if recording.tables is not rows.table_BP:
            recording.rows.table_BP.copy_(rows.table_BP)
            recording.tables = rows.table_BP
        recording.graph.replay()
        return recording.logits_BZ.clone()  # the next replay writes there

    def recorded(self, rows: int) -> torch.cuda.CUDAGraph:
        """The latest recording that serves so many rows; KeyError if there is none."""
        for (batch, _), recording in reversed(self._recordings.items()):
            if batch == rows_of_room(rows):
                return recording.graph
        raise KeyError(f"no decode pass of {rows} rows was recorded")

    def _record(self, rows: PagedRows) -> _Recording:
        """Record a pass. The one that runs before it, to compile, writes only what the recorded one will write again."""
        device, batch = self.model.device, len(rows.past)
        still = replace(rows, past=[0] * batch, table_BP=rows.table_BP.clone())
        state_GB = self.inputs.numbers_FB(batch)[STATE:]
        kept_GB = state_GB.clone()
        state_GB.fill_(-1)  # such rows advance no state
        warm_up(lambda: self._pass(still), device)
        graph, logits_BZ = record_graph(lambda: self._pass(still), self._memory, device)
        state_GB.copy_(kept_GB)
        return _Recording(graph, still, logits_BZ, rows.table_BP)

    def _pass(self, rows: PagedRows) -> Tensor:
        state = PagedState(self.pool.layers(rows), rows)
        logits = self.model(self.inputs.ids_B1(len(rows.past)), state, logits="last").logits_BTZ
        assert logits is not None
        return logits[:, 0]
