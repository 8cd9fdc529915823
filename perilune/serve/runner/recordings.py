"""Decode passes on a CPU, recorded once for each number of rows: a step is then its kernels and nothing else.

The counterpart of `graphs` (CUDA): a recording reads the description of its rows where `DecodeInputs` keeps it, and their page
tables from a copy of its own. The first pass over so many rows runs as usual, the second one is recorded while it runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import PagedRows, PagedState
from perilune.ops.choice import forced
from perilune.ops.moe import routed_experts
from perilune.ops.native.recording import NotRecordable, Recording, record
from perilune.serve.runner.inputs import DecodeInputs
from perilune.serve.runner.pages import PagePool

MOST_BYTES = 2**28  # of tensors that recordings keep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    rows: PagedRows
    logits_BZ: Tensor
    recording: Recording


class DecodeRecordings:
    """Decoding by recordings.

    Args:
        model: in eval mode, on a CPU; its weights are changed in place only.
        pool: its pages.
        inputs: where the rows of a pass are described.
    """

    def __init__(self, model: Transformer, pool: PagePool, inputs: DecodeInputs) -> None:
        self.model, self.pool, self.inputs = model, pool, inputs
        self._recorded: OrderedDict[tuple, _Recorded | None] = OrderedDict()  # None: ran once
        self._weights = [parameter.detach() for parameter in model.parameters()]  # what is recorded stays readable
        self._refused = False

    @staticmethod
    def why_not(model: Transformer, pool: PagePool) -> str | None:
        """Why the decode passes of a model are not recorded; None if they are."""
        if model.device.type != "cpu":
            return f"C kernels run on the CPU, not on {model.device.type}"
        if model.compute_dtype is not torch.float32:
            return f"C kernels decode in float32, not in {str(model.compute_dtype)[6:]}"
        others = sorted(set(model.cfg.layer_mixers) - {"kda", "mla"})
        if others:
            return f"layers of kind {', '.join(others)} ask the host while they decode"
        if any(layer.experts_function is not routed_experts for layer in model.moe_layers()):
            return "experts in another format ask the host while they decode"
        return None

    def run(self, rows: PagedRows) -> Tensor:
        """Scores `[B, Z]` after one more token of each row in `inputs`; the rows' states and caches are advanced."""
        key = *rows.table_BP.shape, torch.get_num_threads(), forced()
        if self._refused or key not in self._recorded:
            self._recorded[key] = None
            return self._pass(rows)
        recorded = self._recorded[key]
        if recorded is None:
            return self._record(key, rows)
        self._recorded.move_to_end(key)
        recorded.rows.table_BP.copy_(rows.table_BP)
        recorded.recording.replay()
        return recorded.logits_BZ.clone()  # the next replay writes there

    def _record(self, key: tuple, rows: PagedRows) -> Tensor:
        """Run a pass and keep what it did."""
        still = replace(rows, past=[0] * len(rows.past), table_BP=rows.table_BP.clone())
        with record() as recorder:
            logits_BZ = self._pass(still)
        try:
            recording = recorder.finish()
        except NotRecordable as error:
            logger.info("decode passes are not recorded: %s", error)
            self._refused = True
            self._recorded.clear()
            return logits_BZ
        self._recorded[key] = _Recorded(still, logits_BZ, recording)
        kept = [one for one in self._recorded.items() if one[1] is not None]
        over = sum(one.recording.nbytes for _, one in kept if one) - MOST_BYTES
        for old, one in kept[:-1]:
            if over <= 0:
                break
            over -= one.recording.nbytes if one else 0
            del self._recorded[old]
        return logits_BZ.clone()

    def _pass(self, rows: PagedRows) -> Tensor:
        ids_B1 = self.inputs.ids_B1(len(rows.past))
        logits = self.model(ids_B1, PagedState(self.pool.layers(rows), rows), logits="last").logits_BTZ
        assert logits is not None
        return logits[:, 0]
