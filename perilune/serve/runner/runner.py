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
from perilune.ops.linear import FEW_ROWS
from perilune.serve.cache import Chunk
from perilune.serve.runner.graphs import DecodeGraphs, rows_of_room
from perilune.serve.runner.inputs import DecodeInputs
from perilune.serve.runner.pages import PagePool
from perilune.serve.runner.passes import Passes
from perilune.serve.runner.prefill_graphs import PrefillGraphs
from perilune.serve.runner.recordings import DecodeRecordings
from perilune.serve.runner.rows import DecodeRows, exactly
from perilune.serve.schedule import Plan, Row
from perilune.serve.staging import to_device

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
        passes: passes as they are, not recorded.
        decode_recordings, prefill_graphs: recorded ones; None: there are none, the log says why.
        packs: whether chunks of several prompts may be in one pass.
        group: most rows of a decode pass.
        tokens_run: tokens that went through the model in all.
        launches: whether `run` returns before the device has computed.
    """

    def __init__(
        self, model: Transformer, pool: PagePool, vocab_size: int, *, deterministic: bool = False, most_rows: int = 1024,
        most_tokens: int = 8192, longest: int = 1 << 20, graphs: str = "auto",
    ) -> None:  # fmt: skip
        self.model, self.pool, self.vocab_size = model.eval(), pool, vocab_size
        self.passes = Passes(model, pool, vocab_size)
        self.group = FEW_ROWS if deterministic else 1 << 30
        self.most_rows, self.longest = most_rows, longest
        self.tokens_run = 0
        self.launches = model.device.type == "cuda"
        self.packs = not deterministic and _takes_parts(model)
        self._inputs = DecodeInputs(rows_of_room(most_rows), pool.geometry.groups, model.device)
        self._decoding: dict[int, DecodeRows] = {}
        self.decode_recordings: DecodeGraphs | DecodeRecordings | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self._choose_recordings(most_tokens, graphs)

    def _choose_recordings(self, most_tokens: int, graphs: str) -> None:
        model, pool = self.model, self.pool
        recorder = DecodeGraphs if self.launches else DecodeRecordings
        off = "switched off" if self.launches and graphs == "off" else None
        why_not = {"decode": off or recorder.why_not(model, pool)}
        if self.launches:
            off = None if graphs == "auto" else "switched off"
            off = off or (None if self.packs else "their chunks run alone")
            why_not["prefill"] = off or PrefillGraphs.why_not(model, pool)
            memory = torch.cuda.graph_pool_handle()  # one pass runs at a time
            if why_not["prefill"] is None:
                self.prefill_graphs = PrefillGraphs(model, pool, memory, most_tokens, self.longest)
            if why_not["decode"] is None:
                self.decode_recordings = DecodeGraphs(model, pool, self._inputs, memory)
        elif why_not["decode"] is None:
            self.decode_recordings = DecodeRecordings(model, pool, self._inputs)
        for kind, reason in why_not.items():
            if reason is not None:
                logger.info("%s passes are not recorded: %s", kind, reason)

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
            self.prefill(rows, scores)
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
        if not isinstance(self.decode_recordings, DecodeGraphs):
            raise KeyError("decode passes of this model are not recorded as CUDA graphs")
        return self.decode_recordings.recorded(rows)

    def _decode(self, first: int, rows: Sequence[Row], scores: Scores) -> None:
        """One token of each row; `first` tells groups apart, each of which keeps its page tables."""
        paged = self._decode_rows(first).of(rows)
        self.tokens_run += len(rows)
        if self.decode_recordings is None:
            logits_BZ = self.passes.scores(self._inputs.ids_B1(len(rows)), paged, "last")[:, 0]
        else:
            logits_BZ = self.decode_recordings.run(paged)[: len(rows), : self.vocab_size]
        scores.parts.append((rows, logits_BZ))
        self._export_ends([row.chunk for row in rows])

    def _decode_rows(self, first: int) -> DecodeRows:
        if first not in self._decoding:
            room = self.decode_recordings.room if isinstance(self.decode_recordings, DecodeGraphs) else exactly
            page_tokens, spare = self.pool.geometry.page_tokens, self.pool.spare.tokens
            self._decoding[first] = DecodeRows(page_tokens, self._inputs, spare, room)
        return self._decoding[first]

    def prefill(self, rows: Sequence[Row], scores: Scores) -> None:
        """Run chunks of several sequences, in as few passes as possible; adds to `scores`."""
        together = [row for row in rows if self.packs and not _alone(row)]
        if self.prefill_graphs is not None:
            self._prefill_recorded(self.prefill_graphs, together, scores)
        elif len(together) > 1:
            self._prefill_together(together, scores)
        for row in rows:
            if _alone(row) or not self.packs or (self.prefill_graphs is None and len(together) < 2):
                self._prefill_alone(row, scores)

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
                self._prefill_alone(rows[0], scores)
            return
        self.tokens_run += sum(row.chunk.end - row.chunk.start for row in rows)
        drawing = [place for place, row in enumerate(rows) if row.draws]
        if drawing:
            if len(drawing) < len(rows):
                logits_NZ = logits_NZ[to_device(drawing, self.model.device)]
            scores.parts.append(([rows[place] for place in drawing], logits_NZ[:, : self.vocab_size]))
        self._export_ends([row.chunk for row in rows])

    def _prefill_alone(self, row: Row, scores: Scores) -> None:
        """A chunk of one sequence."""
        chunk, content = row.chunk, row.sequence.content
        every = _scores_all(row)
        what = "all" if every else "last" if row.draws else "none"
        images = None if content is None else content.image_rows(chunk.start, chunk.end)
        self.tokens_run += chunk.end - chunk.start
        logits_TZ = self.passes.alone(chunk, row.tokens, what, images)
        if every:
            scores.prompt[row.sequence.name] = logits_TZ
        if row.draws:
            scores.parts.append(([row], logits_TZ[-1:]))
        self._export_ends([chunk])

    def _prefill_together(self, rows: Sequence[Row], scores: Scores) -> None:
        """Chunks of several sequences, of any lengths, in one pass."""
        chunks = [row.chunk for row in rows]
        tokens = [token for row in rows for token in row.tokens]
        self.tokens_run += len(tokens)
        ends = itertools.accumulate(chunk.end - chunk.start for chunk in chunks)
        places = [end - 1 for row, end in zip(rows, ends) if row.draws]
        logits_NZ = self.passes.together(chunks, tokens, places)
        if places:
            scores.parts.append(([row for row in rows if row.draws], logits_NZ))
        self._export_ends(chunks)

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
