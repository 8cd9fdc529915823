"""What a micro-batch's forward pass reads on a CUDA device, in tensors that stay where they are.

A recorded step reads the same addresses at every replay, so everything that differs between micro-batches of one form
lies in tensors that are refilled: tokens, targets, and where the documents begin. Sizes follow from the form alone: the
batch's shape and one of few numbers of documents that there is room for. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune.data.loader import Batch
from perilune.model.transformer import LossOutput, Transformer
from perilune.ops.kda import select as select_kda
from perilune.ops.kda.gpu.padded_plan import Room
from perilune.ops.kda.gpu.support import DIMS
from perilune.ops.segments import Segments

TOKENS_PER_DOCUMENT = (1024, 128)  # on average: what there is room for; a batch of shorter documents has no form


def obstacle(model: Transformer) -> str | None:
    """Why a model cannot be given its inputs in this way; None if it can."""
    if model.device.type != "cuda":
        return f"CUDA graphs are recorded on CUDA devices, not on {model.device.type}"
    if _recurs(model):
        choice = select_kda(model.device, *[model.compute_dtype] * 5)
        if choice.implementation != "triton":
            return f"KDA asks the host: {choice.reason}"
        assert model.cfg.kda is not None, "a layer with a recurrence has its sizes"
        dims = model.cfg.kda.head_dim, model.cfg.kda.value_dim
        if any(dim not in DIMS for dim in dims):
            return f"KDA asks the host: its kernels need K and V to be 64 or 128, not {dims[0]} and {dims[1]}"
    return None


class Form(NamedTuple):
    """What decides the sizes of a pass.

    Attributes:
        rows, length: of the batch.
        documents: that there is room for; 0 = each row is one document.
    """

    rows: int
    length: int
    documents: int

    @staticmethod
    def of(micro_batches: Sequence[Batch]) -> list[Form] | None:
        """The forms of a step's micro-batches: of these alone, so that a resumed run takes the same; None if one has none.

        All have room for documents of the same average length, so that few combinations of forms occur.
        """
        levels = [_level(batch) for batch in micro_batches]
        if any(level is None for level in levels):
            return None
        level = max(level for level in levels if level is not None)
        return [Form(*batch.ids_BT.shape, _room_for(*batch.ids_BT.shape, level)) for batch in micro_batches]


def _level(batch: Batch) -> int | None:
    """0 = whole rows, else one more than the first of `TOKENS_PER_DOCUMENT` that gives enough room; None if none does."""
    if batch.image_rows:
        return None
    rows, length = batch.ids_BT.shape
    documents = rows + int(batch.starts_BT[:, 1:].sum())
    if documents == rows:
        return 0
    levels = range(1, len(TOKENS_PER_DOCUMENT) + 1)
    return next((level for level in levels if documents <= _room_for(rows, length, level)), None)


def _room_for(rows: int, length: int, level: int) -> int:
    return max(2 * rows, rows * length // TOKENS_PER_DOCUMENT[level - 1]) if level else 0


class Inputs:
    """The tensors of one form.

    Args:
        model: on its device.
        form: see `Form`.
    """

    def __init__(self, model: Transformer, form: Form) -> None:
        device, shape = model.device, (form.rows, form.length)
        self.ids_BT = torch.zeros(shape, dtype=torch.int64, device=device)
        self.targets_BT = torch.zeros(shape, dtype=torch.int64, device=device)
        self._room = _room(model, form) if form.documents else None
        self._documents = form.documents
        numbers = form.documents + 1 + (self._room.numbers if self._room else 0)
        self._numbers = torch.zeros(numbers, dtype=torch.int32, device=device)

    def fill(self, batch: Batch) -> None:
        """Take over a batch of this form."""
        _copy(self.ids_BT, batch.ids_BT)
        _copy(self.targets_BT, batch.targets_BT)
        if not self._documents:
            return
        rows, length = batch.ids_BT.shape
        segments = Segments.from_starts(batch.starts_BT)
        offsets = tuple(range(0, (rows + 1) * length, length)) if segments is None else segments.offsets
        assert offsets is not None, "boundaries that were found on the host are known there"
        missing = self._documents + 1 - len(offsets)
        parts = [np.asarray(offsets + offsets[-1:] * missing, np.int32)]
        if self._room is not None:
            parts.append(self._room.filled(offsets))
        _copy(self._numbers, torch.from_numpy(np.concatenate(parts)))

    def loss(self, model: Transformer) -> LossOutput:
        """The forward pass."""
        return model.loss(self.ids_BT, self.targets_BT, self._segments())

    def _segments(self) -> Segments | None:
        """Made anew for each pass, since what follows from the boundaries is kept in it."""
        if not self._documents:
            return None
        bounds, tables = self._numbers[: self._documents + 1], self._numbers[self._documents + 1 :]
        plan = None if self._room is None else self._room.plan(tables)
        return Segments(bounds, *self.ids_BT.shape, plan=plan)


def _room(model: Transformer, form: Form) -> Room | None:
    """Of the KDA kernels' tables; None for a model without such layers."""
    if not _recurs(model):
        return None
    kda = model.cfg.kda
    assert kda is not None, "a layer with a recurrence has its sizes"
    return Room.of(
        form.rows, form.length, form.documents, kda.num_heads, kda.head_dim, kda.value_dim, model.compute_dtype, model.device
    )  # fmt: skip


def _recurs(model: Transformer) -> bool:
    return bool({"kda", "gdn"} & set(model.cfg.layer_mixers))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
