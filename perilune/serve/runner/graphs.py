"""Decode passes recorded as CUDA graphs: a step of a few hundred kernels is one launch.

Everything a pass over paged rows needs to know lies in tensors, so a recording of it serves any rows: their description
is copied into the tensors that the recording reads. There is one recording for each number of rows and each power of two
of pages of a sequence; recordings share their memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import PagedRecurrent, PagedRows, PagedState
from perilune.ops.kda.decode_pages import select as select_kda
from perilune.ops.mla.kernel_choice import PAGE
from perilune.serve.runner.pages import PagePool

MOST = 128  # recordings that are kept
WARM_UP = 2  # passes before a recording: the first compiles


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    ids_B1: Tensor
    rows: PagedRows
    logits_BZ: Tensor


class DecodeGraphs:
    """Decoding by recordings.

    Args:
        model: in eval mode, on a CUDA device.
        pool: its pages.
    """

    def __init__(self, model: Transformer, pool: PagePool) -> None:
        self.model, self.pool = model, pool
        self._recordings: OrderedDict[tuple[int, int], _Recording] = OrderedDict()
        self._memory = torch.cuda.graph_pool_handle()

    @staticmethod
    def why_not(model: Transformer, pool: PagePool) -> str | None:
        """Why the decode passes of a model cannot be recorded; None if they can."""
        if model.device.type != "cuda":
            return f"CUDA graphs are recorded on CUDA devices, not on {model.device.type}"
        others = sorted(set(model.cfg.layer_mixers) - {"kda", "mla"})
        if others:
            return f"layers of kind {', '.join(others)} ask the host while they decode"
        if model.cfg.mla is not None and model.cfg.mla.rope_theta is not None:
            return "rotated positions come from the host"
        if pool.geometry.attention_layers and pool.geometry.page_tokens % PAGE:
            return f"pages of {pool.geometry.page_tokens} tokens are not a multiple of the {PAGE} that the kernels read"
        empty = torch.zeros(1, 0, dtype=torch.int64, device=model.device)
        rows = PagedRows([0], empty[0], empty[0], empty, empty[0], empty.expand(pool.geometry.groups, 0))
        token = torch.empty(1, 1, dtype=model.compute_dtype, device=model.device)
        for layer in pool.layers(rows):
            if isinstance(layer, PagedRecurrent):
                choice = select_kda(token, layer.window_PHw, layer.memory_PHVK)
                return None if choice.implementation == "cuda" else choice.reason
        return None

    def run(self, ids_B: Sequence[int], rows: PagedRows) -> Tensor:
        """Scores `[B, Z]` after one more token of each row; the rows' states and caches are advanced."""
        batch, width = rows.table_BP.shape
        key = batch, 1 << (width - 1).bit_length()
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(*key, ids_B, rows)
            if len(self._recordings) > MOST:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        _fill(recording, ids_B, rows)
        recording.graph.replay()
        return recording.logits_BZ.clone()  # the next replay writes there

    def recorded(self, rows: int) -> torch.cuda.CUDAGraph:
        """The latest recording of so many rows; KeyError if there is none."""
        for (batch, _), recording in reversed(self._recordings.items()):
            if batch == rows:
                return recording.graph
        raise KeyError(f"no decode pass of {rows} rows was recorded")

    def _record(self, batch: int, width: int, ids_B: Sequence[int], rows: PagedRows) -> _Recording:
        """Record a pass. What runs before it, to compile, writes only what the pass itself will write again."""
        device = self.model.device
        still = PagedRows(
            past=[0] * batch,
            page_N=rows.page_N.clone(),
            slot_N=rows.slot_N.clone(),
            table_BP=torch.zeros(batch, width, dtype=torch.int64, device=device),
            length_B=rows.length_B.clone(),
            state_GB=torch.full_like(rows.state_GB, -1),  # such rows advance no state
        )
        recording = _Recording(
            torch.cuda.CUDAGraph(), torch.zeros(batch, 1, dtype=torch.int64, device=device), still, torch.empty(0)
        )
        _fill(recording, ids_B, rows, states=False)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._pass(recording)
        torch.cuda.current_stream(device).wait_stream(stream)
        # Another thread may call CUDA meanwhile, an encoder of images for instance.
        with torch.cuda.graph(recording.graph, pool=self._memory, capture_error_mode="thread_local"):
            logits_BZ = self._pass(recording)
        return _Recording(recording.graph, recording.ids_B1, still, logits_BZ)

    def _pass(self, recording: _Recording) -> Tensor:
        state = PagedState(self.pool.layers(recording.rows), recording.rows)
        logits = self.model(recording.ids_B1, state, logits="last").logits_BTZ
        assert logits is not None
        return logits[:, 0]


def _fill(recording: _Recording, ids_B: Sequence[int], rows: PagedRows, *, states: bool = True) -> None:
    """Describe rows to a recording."""
    recording.ids_B1.copy_(torch.tensor(ids_B)[:, None], non_blocking=True)
    recording.rows.table_BP[:, : rows.table_BP.shape[1]] = rows.table_BP
    for field in fields(PagedRows):
        if field.name in ("page_N", "slot_N", "length_B") or states and field.name == "state_GB":
            getattr(recording.rows, field.name).copy_(getattr(rows, field.name))
