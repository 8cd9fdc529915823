"""Muon's step on a GPU: blocks of equal shape, of every parameter, by their addresses (`ops.triton.muon`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.newton_schulz import NORM_FLOOR, iterate
from perilune.optim.groups import Cut

TOGETHER = 1 << 28  # numbers of the blocks that are orthogonalised at once: large products are fast, and take memory


class _Batch(NamedTuple):
    """Addresses `[B, 3]` of blocks of one shape, and whether all of them are aligned."""

    shape: tuple[int, int]
    table_B3: Tensor
    dense: bool


class Batches:
    """Where the blocks of all parameters lie. Keeps the gradients that it points to.

    Args:
        params: float32, contiguous, each with a gradient (zeros are made where there is none).
        momenta: one for each.
        members: (number of the parameter, cut).
    """

    def __init__(self, params: Sequence[Tensor], momenta: Sequence[Tensor], members: Sequence[tuple[int, Cut]]) -> None:
        from perilune.ops.triton.muon import aligned

        self.device = params[0].device
        self._keep = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in params]
        rows: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, cut in members:
            columns = params[index].shape[-1]
            bases = [x.data_ptr() for x in (self._keep[index], momenta[index], params[index])]
            starts = (cut.start + cut.offset + cut.stride * n for n in range(cut.count))
            places = rows.setdefault((cut.rows, columns), [])
            places += [tuple(base + 4 * columns * start for base in bases) for start in starts]
        self._batches = []
        for shape, places in rows.items():
            table = torch.tensor(places, dtype=torch.int64)
            if params[0].is_cuda:
                table = table.pin_memory().to(params[0].device, non_blocking=True)
            dense = aligned([address for row in places for address in row], shape[0] * shape[1])
            for part in table.split(max(1, TOGETHER // (shape[0] * shape[1]))):
                self._batches.append(_Batch(shape, part, dense))

    def step(self, lr: Tensor, scale: Tensor | None, mu: float, decay: float, dtype: torch.dtype) -> None:
        """Move every block; see `Muon.step`."""
        from perilune.ops.triton.muon import move, units

        for shape, table_B3, dense in self._batches:
            unit_BMN = units(table_B3, scale, mu, shape, dtype, NORM_FLOOR, dense)
            towards = iterate(unit_BMN).contiguous()
            move(table_B3, lr, towards, decay, 0.2 * math.sqrt(max(shape)), dense)
