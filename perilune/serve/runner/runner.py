"""Executes plans: operations on pages, forward passes over them, exports; and gives back the scores to draw from.

Rows that decode run together, whatever their lengths, and so do chunks of prompts. What a row computes depends on its own
tokens and on where its chunks end, up to the rounding of products that have more or fewer rows. In the deterministic
mode it depends on nothing else: chunks run alone, and decoding goes in groups for which every kernel treats each row
alike, so fp32 on the CPU gives the same bits in any company.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import PagedRows, PagedState
from perilune.model.vision import ImageRows
from perilune.ops.linear import FEW_ROWS
from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import CopyPage, ZeroState
from perilune.serve.runner.graphs import SIZES, DecodeGraphs, rows_of_room, widths_up_to
from perilune.serve.runner.inputs import DecodeInputs
from perilune.serve.runner.pages import PagePool
from perilune.serve.runner.prefill_graphs import PrefillGraphs
from perilune.serve.runner.recordings import DecodeRecordings
from perilune.serve.runner.rows import DecodeRows, chunk_rows, exactly
from perilune.serve.schedule import Plan, Row
from perilune.serve.staging import to_device

# Tokens of chunks in whose passes kernels differ that no recording has, and with some before them; a CPU takes two.
WAYS = (1, 2, 3, 5, 8, 9, 17, 25, 33, 96, 129, 501, 1001, 2001)
BEHIND = ((64, 33), (64, 500))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a step computed.

    Attributes:
        parts: rows that draw, and the scores after the last token of each, `[rows, Z]`; each pass adds a part.
        prompt: scores after every token of a chunk `[T, Z]`, of sequences that want them.
    """

    parts: list[tuple[Sequence[Row], Tensor]] = field(default_factory=list)
    prompt: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """All that draw."""
        return [row for rows, _ in self.parts for row in rows]

    def together(self) -> Tensor:
        """Scores of `rows`, `[N, Z]`."""
        parts = [logits_NZ for _, logits_NZ in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def logits(self) -> dict[str, Tensor]:
        """The same by the names of sequences, `[Z]` each."""
        return {
            row.sequence.name: logits_Z
            for rows, logits_NZ in self.parts
            for row, logits_Z in zip(rows, logits_NZ.unbind(), strict=True)
        }


class ModelRunner:
    """Runs a model over the pages of a pool.

    Args:
        model: in eval mode from now on; its device and compute dtype are used as they are.
        pool: of the same device and dtype.
        vocab_size: scores of ids beyond it, with which a model may be padded, are cut off.
        deterministic: decode in groups of rows whose results do not depend on each other, bit by bit.
        most_rows: of a step.
        most_tokens: of a step.
        longest: tokens of a sequence.
        graphs: which passes are recorded on a GPU, see `EngineSettings.cuda_graphs`.

    Attributes:
        tokens_run: tokens that went through the model in all.
        launches: whether `run` returns before the device has computed.
    """

    def __init__(
        self, model: Transformer, pool: PagePool, vocab_size: int, *, deterministic: bool = False, most_rows: int = 1024,
        most_tokens: int = 8192, longest: int = 1 << 20, graphs: str = "auto",
    ) -> None:  # fmt: skip
        self.model, self.pool, self.vocab_size = model.eval(), pool, vocab_size
        self.group = FEW_ROWS if deterministic else 1 << 30
        self.tokens_run = 0
        self.launches = model.device.type == "cuda"
        self._packs = not deterministic and _takes_parts(model)
        self.most_rows = most_rows
        self._inputs = DecodeInputs(rows_of_room(most_rows), pool.geometry.groups, model.device)
        self._decoding: dict[int, DecodeRows] = {}
        self._recorded: DecodeGraphs | DecodeRecordings | None = None
        self._prefills: PrefillGraphs | None = None
        self.longest = longest
        self._choose_recordings(most_tokens, graphs)

    def _choose_recordings(self, most_tokens: int, graphs: str) -> None:
        model, pool = self.model, self.pool
        recorder = DecodeGraphs if self.launches else DecodeRecordings
        off = "switched off" if self.launches and graphs == "off" else None
        why_not = {"decode": off or recorder.why_not(model, pool)}
        if self.launches:
            off = None if graphs == "auto" else "switched off"
            off = off or (None if self._packs else "their chunks run alone")
            why_not["prefill"] = off or PrefillGraphs.why_not(model, pool)
            memory = torch.cuda.graph_pool_handle()  # one pass runs at a time
            if why_not["prefill"] is None:
                self._prefills = PrefillGraphs(model, pool, memory, most_tokens, self.longest)
            if why_not["decode"] is None:
                self._recorded = DecodeGraphs(model, pool, self._inputs, memory)
        elif why_not["decode"] is None:
            self._recorded = DecodeRecordings(model, pool, self._inputs)
        for kind, reason in why_not.items():
            if reason is not None:
                logger.info("%s passes are not recorded: %s", kind, reason)

    def preparations(self, *, rare: bool = True) -> list[tuple[str, Callable[[], object]]]:
        """What makes sure that no request waits for a compiler or a recording: pieces of work, each of below a second once
        kernels are in their cache, with what they are for. They may run at any time between two steps.

        Args:
            rare: also passes that are not recorded though others are, those of scored prompts for one.
        """
        pieces: list[tuple[str, Callable[[], object]]] = [("copies of pages", self._try_copies)]
        chunks = [(0, tokens) for tokens in (WAYS if self.launches else WAYS[:2])]
        if self.launches:
            chunks += BEHIND
            behind = itertools.takewhile(lambda n: n < self.longest, (64 << n for n in itertools.count()))
            chunks += [(before, 3) for before in behind]  # of few tokens, attention has a step for each power of two
        for before, tokens in chunks if rare or self._prefills is None else ():
            pieces.append((f"{tokens} tokens as they are", partial(self._try_pass, before, tokens)))
        graphs, prefills = self._recorded, self._prefills
        if prefills is None and self._packs:
            pieces.append(("prompts together", self._try_together))
        elif prefills is not None:
            for room in reversed(prefills.rooms):  # the largest first: the others find its memory
                pieces.append((f"prefill of {room.tokens}", partial(prefills.ready, room)))
        if isinstance(graphs, DecodeGraphs):
            most = rows_of_room(min(self.most_rows, self.group))
            for count in reversed([size for size in SIZES if size <= most]):
                for width in widths_up_to(self.pool.geometry.pages_for(self.longest)):
                    pieces.append((f"decoding of {count}", partial(self._ready_to_decode, graphs, count, width)))
        return pieces

    @torch.inference_mode()
    def _ready_to_decode(self, graphs: DecodeGraphs, count: int, width: int) -> None:
        inputs = DecodeRows(self.pool.geometry.page_tokens, self._inputs, self.pool.spare.tokens)
        graphs.ready(inputs.filling(count, width))

    @torch.inference_mode()
    def _try_copies(self) -> None:
        """Copies of pages, spare ones."""
        spare, groups = self.pool.spare, self.pool.geometry.groups
        self.pool.operate([CopyPage(spare.tokens, spare.tokens, 1), ZeroState((spare.unread,) * groups)])
        self.pool.copy((spare.unread,) * groups, (spare.states,) * groups)

    @torch.inference_mode()
    def _try_together(self) -> None:
        """Two prompts in a pass that is not recorded."""
        chunk = Chunk(
            "", 0, 0, 2, (self.pool.spare.tokens,), (self.pool.spare.states,) * self.pool.geometry.groups, (), ()
        )
        rows = self._rows([chunk, chunk])
        self.model.hidden(to_device([[0] * 4], self.model.device), PagedState(self.pool.layers(rows), rows))

    @torch.inference_mode()
    def _try_pass(self, before: int, tokens: int) -> None:
        """A pass that is not recorded, over spare pages."""
        spare, shape = self.pool.spare, self.pool.geometry
        pages = (spare.tokens,) * shape.pages_for(before + tokens)
        chunk = Chunk("", 0, before, before + tokens, pages, (spare.states,) * shape.groups, (), ())
        self._logits(to_device([[0] * tokens], self.model.device), self._rows([chunk]), "all")

    @torch.inference_mode()
    def run(self, plan: Plan, stage: int | None = None) -> Scores:
        """Execute a step to its end, or one stage of it after the other. On a GPU it is launched, and nothing waits for it.

        Rows that await their token read what `keep` was given last, which is for this step alone.
        """
        scores = Scores()
        if not stage:
            for row in plan.rows:
                if row.chunk.operations:
                    self.pool.operate(row.chunk.operations)
            for first in range(0, len(plan.decode), self.group):
                self._decode(first, plan.decode[first : first + self.group], scores)
            self._inputs.forget_drawn()
        for rows in plan.stages if stage is None else plan.stages[stage : stage + 1]:
            self._prefill_all(rows, scores)
        return scores

    @torch.inference_mode()
    def keep(self, rows: Sequence[Row], ids_N: Tensor) -> None:
        """Tokens that rows of the stage that ran last have drawn, on the device: the next step may have rows for them."""
        self._inputs.keep_drawn([row.sequence.name for row in rows], ids_N)

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
        paged = self._decode_rows(first).of(rows)
        self.tokens_run += len(rows)
        if self._recorded is None:
            logits_BZ = self._logits(self._inputs.ids_B1(len(rows)), paged, "last")[:, 0]
        else:
            logits_BZ = self._recorded.run(paged)[: len(rows), : self.vocab_size]
        scores.parts.append((rows, logits_BZ))
        self._export_ends([row.chunk for row in rows])

    def _decode_rows(self, first: int) -> DecodeRows:
        if first not in self._decoding:
            room = self._recorded.room if isinstance(self._recorded, DecodeGraphs) else exactly
            page_tokens, spare = self.pool.geometry.page_tokens, self.pool.spare.tokens
            self._decoding[first] = DecodeRows(page_tokens, self._inputs, spare, room)
        return self._decoding[first]

    def _prefill_all(self, rows: Sequence[Row], scores: Scores) -> None:
        """Chunks of several sequences, in one pass as far as possible."""
        together = [row for row in rows if self._packs and not _alone(row)]
        if self._prefills is not None:
            self._prefill_recorded(self._prefills, together, scores)
        elif len(together) > 1:
            self._prefill_together(together, scores)
        for row in rows:
            if _alone(row) or not self._packs or (self._prefills is None and len(together) < 2):
                self._prefill(row, scores)

    def _prefill_recorded(self, passes: PrefillGraphs, rows: Sequence[Row], scores: Scores) -> None:
        """Chunks in as few recorded passes as take them; what no recording takes runs as it is."""
        if not rows:
            return
        logits_NZ = passes.run(rows)
        if logits_NZ is None:
            half = len(rows) // 2
            if half and not passes.failed and all(passes.room_for([row.chunk]) for row in rows):
                self._prefill_recorded(passes, rows[:half], scores)
                self._prefill_recorded(passes, rows[half:], scores)
            elif half:
                self._prefill_together(rows, scores)
            else:
                self._prefill(rows[0], scores)
            return
        self.tokens_run += sum(row.chunk.end - row.chunk.start for row in rows)
        drawing = [place for place, row in enumerate(rows) if row.draws]
        if drawing:
            if len(drawing) < len(rows):
                logits_NZ = logits_NZ[to_device(drawing, self.model.device)]
            scores.parts.append(([rows[place] for place in drawing], logits_NZ[:, : self.vocab_size]))
        self._export_ends([row.chunk for row in rows])

    def _prefill(self, row: Row, scores: Scores) -> None:
        """A chunk of one sequence."""
        chunk, content = row.chunk, row.sequence.content
        every = _scores_all(row)
        what = "all" if every else "last" if row.draws else "none"
        images = None if content is None else content.image_rows(chunk.start, chunk.end)
        self.tokens_run += chunk.end - chunk.start
        logits = self._logits(to_device([row.tokens], self.model.device), self._rows([chunk]), what, images)
        if every:
            scores.prompt[row.sequence.name] = logits[0]
        if row.draws:
            scores.parts.append(([row], logits[:, -1]))
        self._export_ends([chunk])

    def _prefill_together(self, rows: Sequence[Row], scores: Scores) -> None:
        """Chunks of several sequences, of any lengths, in one pass."""
        chunks = [row.chunk for row in rows]
        packed = self._rows(chunks)
        ids = to_device([[token for row in rows for token in row.tokens]], self.model.device)
        self.tokens_run += ids.numel()
        hidden_BTD = self.model.hidden(ids, PagedState(self.pool.layers(packed), packed))
        ends = list(itertools.accumulate(chunk.end - chunk.start for chunk in chunks))
        drawing = [(row, end - 1) for row, end in zip(rows, ends) if row.draws]
        if drawing:
            places = to_device([place for _, place in drawing], self.model.device)
            last_ND = self.model.norm(hidden_BTD[0, places])
            scores.parts.append(([row for row, _ in drawing], self.model.lm_head(last_ND)[:, : self.vocab_size]))
        self._export_ends(chunks)

    def _rows(self, chunks: Sequence[Chunk]) -> PagedRows:
        return chunk_rows(chunks, self.pool.geometry.page_tokens, self.model.device)

    def _logits(self, ids_BT: Tensor, rows: PagedRows, what: str, images: ImageRows | None = None) -> Tensor:
        """One pass over rows of equally many tokens; returns scores `[B, T or 1, Z]`, none of them with "none"."""
        out = self.model(ids_BT, PagedState(self.pool.layers(rows), rows), logits=what, images=images)
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
