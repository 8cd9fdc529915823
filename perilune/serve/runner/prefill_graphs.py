"""Prefill passes recorded as CUDA graphs: of a few thousand tokens the launches take longer than the kernels.

A pass has one of a few sizes; chunks run in the smallest that holds them, which is filled up (`prefill`). The kernels are those
that chunks of several sequences take anyway, and what is filled up is a sequence of its own, so that nothing of it reaches the
others. Recordings are made when they are first needed, or before, and share their memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.errors import PeriluneError
from perilune.model import Transformer
from perilune.model.paged import PagedState
from perilune.ops.cuda.graph import record_graph, warm_up
from perilune.ops.first_use import tell
from perilune.ops.kda.gpu.padded_plan import Room as Tables
from perilune.ops.kda.gpu.plan import CHUNK
from perilune.ops.kda.gpu.support import DIMS, dtype_obstacle
from perilune.serve.cache import Chunk
from perilune.serve.runner.graphs import obstacle
from perilune.serve.runner.pages import PagePool
from perilune.serve.runner.prefill import CHUNKS, MARKS, PrefillInputs, Room
from perilune.serve.runner.rows import marked
from perilune.serve.schedule import Row

# On one H200 a pass of `mini` takes 5.2 ms for 64 tokens and 6.4 for 512: below, more sizes would gain nothing.
TOKENS = (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Tokens in the pages of all sequences; keys and values of all of them are rebuilt, which takes less time than launches where most layers
# are recurrent. On one H200 500 tokens of `mini` behind 20,480 to 57,344 others take 12 to 16 ms so, 66 kernel by kernel.
CACHED = (4096, 16384, 65536)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: PrefillInputs
    logits_NZ: Tensor


class PrefillGraphs:
    """Prefill by recordings.

    Args:
        model: in eval mode, on a CUDA device.
        pool: its pages.
        memory: of all recordings of which one runs at a time.
        most_tokens: of a step.
        longest: tokens of a sequence; several that are as long run in passes of their own.

    Attributes:
        rooms: sizes of passes.
        failed: why no further recording is made; None as long as they are.
    """

    def __init__(
        self, model: Transformer, pool: PagePool, memory: tuple[int, int], most_tokens: int, longest: int
    ) -> None:
        self.model, self.pool = model, pool
        self._memory = memory
        self._recordings: dict[Room, _Recording] = {}
        self.failed: str | None = None
        size = pool.geometry.page_tokens
        tokens = TOKENS[: 1 + sum(n < most_tokens for n in TOKENS)]
        cached = CACHED[: 1 + sum(n < longest for n in CACHED)]
        self.rooms = [Room(n, -(-held // size)) for n in tokens for held in cached if n <= held]

    @staticmethod
    def why_not(model: Transformer, pool: PagePool) -> str | None:
        """Why the prefill passes of a model cannot be recorded; None if they can."""
        reason = obstacle(model, pool)
        if reason is not None:
            return reason
        kda = model.cfg.kda
        if pool.geometry.recurrent_layers and kda is not None:
            if not {kda.head_dim, kda.value_dim} <= set(DIMS):
                return (
                    f"the recurrence has heads of {kda.head_dim} and {kda.value_dim} channels; its kernels take {DIMS}"
                )
            return dtype_obstacle(model.device, model.compute_dtype)
        return None

    @torch.inference_mode()
    def ready(self, room: Room) -> bool:
        """Make the recording of a size if it is not there; False: it cannot be made."""
        if room not in self._recordings and self.failed is None:
            began = time.perf_counter()
            try:
                self._recordings[room] = self._record(room)
            except torch.OutOfMemoryError as error:
                self.rooms.remove(room)
                logger.warning(
                    "no memory to record a prefill of %d tokens: %s", room.tokens, str(error).splitlines()[0]
                )
                return False
            except (RuntimeError, NotImplementedError, PeriluneError) as error:  # it waits, or no recording can hold it
                torch.cuda.synchronize(self.model.device)  # raises if it was worse than that
                self.failed = str(error).strip().splitlines()[0]
                logger.warning("prefill passes run kernel by kernel: %s", self.failed)
                return False
            tell(f"recorded a prefill of {room.tokens} tokens behind {room.pages} pages", time.perf_counter() - began)
        return room in self._recordings

    def room_for(self, chunks: Sequence[Chunk]) -> Room | None:
        """The smallest size that holds these chunks; None if there is none."""
        exports, size = marked(chunks), self.pool.geometry.page_tokens
        if len(chunks) >= CHUNKS or len(exports) > MARKS:
            return None
        if any((export.position - chunks[n].start) % CHUNK for n, export in exports):
            return None
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        pages = sum(-(-chunk.end // size) for chunk in chunks)
        return min((room for room in self.rooms if room.tokens >= tokens and room.pages >= pages), default=None)

    def run(self, rows: Sequence[Row]) -> Tensor | None:
        """Scores `[rows, Z]` after the last token of each row's chunk; None: no recording serves them, and nothing was done."""
        chunks = [row.chunk for row in rows]
        room = self.room_for(chunks)
        if room is None or not self.ready(room):
            return None
        recording = self._recordings[room]
        recording.inputs.fill(chunks, [row.tokens for row in rows])
        recording.graph.replay()
        return recording.logits_NZ[: len(rows)].clone()  # the next replay writes there

    def graph(self, room: Room) -> torch.cuda.CUDAGraph:
        """The recording of a size that is ready: for measurements."""
        return self._recordings[room].graph

    def _record(self, room: Room) -> _Recording:
        """Record a pass. The one that runs before it, to compile, writes to spare pages only."""
        model, pool, device = self.model, self.pool, self.model.device
        tables, kda = None, model.cfg.kda
        if pool.geometry.recurrent_layers and kda is not None:
            heads = kda.num_heads, kda.head_dim, kda.value_dim
            tables = Tables.of(1, room.tokens, CHUNKS, *heads, model.compute_dtype, device)
        geometry, spare = pool.geometry, pool.spare
        inputs = PrefillInputs(room, geometry.page_tokens, geometry.groups, spare, device, tables)
        nothing = Chunk("", 0, 0, 1, (spare.tokens,), (spare.states,) * geometry.groups, (), ())
        inputs.fill([nothing], [[0]])
        warm_up(lambda: self._pass(inputs), device)
        graph, logits_NZ = record_graph(lambda: self._pass(inputs), self._memory, device)
        return _Recording(graph, inputs, logits_NZ)

    def _pass(self, inputs: PrefillInputs) -> Tensor:
        rows = inputs.rows()
        hidden_BTD = self.model.hidden(inputs.ids_1T, PagedState(self.pool.layers(rows), rows))
        return self.model.lm_head(self.model.norm(hidden_BTD[0, inputs.ends_N]))
