"""Muon along heads (report §2.5): Nesterov momentum, orthogonalised block by block, with decoupled decay.

    M ← μ M + G;   N = G + μ M;   O = NewtonSchulz(N);   W ← (1 − lr·wd) W − lr · 0.2 sqrt(max(rows, columns)) · O

rows and columns are those of the block that is orthogonalised; the factor gives the update AdamW's usual RMS whatever
the block's shape. Blocks of equal shape, of every layer and parameter, are stacked and orthogonalised by one batched
product, so the cost is a handful of large calls instead of thousands of small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.newton_schulz import newton_schulz
from perilune.ops.triton.available import choose as choose_triton
from perilune.optim.groups import Cut
from perilune.optim.muon_batches import Batches


def blocks(matrix: Tensor, cut: Cut) -> Tensor:
    """View the blocks of one cut as `[count, rows, columns]`; writing to it writes to `matrix` (rows × columns, or a
    stack whose leading axes count as rows)."""
    rows_RC = matrix.view(-1, matrix.shape[-1])
    return rows_RC[cut.start : cut.stop].view(cut.count, cut.stride, -1)[:, cut.offset : cut.offset + cut.rows]


@dataclass(slots=True)
class _Block:
    """Blocks of one parameter that join a batch: which parameter, which cut, and whether they lie on their side."""

    param: int
    cut: Cut
    wide: bool


class Muon:
    """Per-head Muon over named matrices.

    Args:
        params: name → parameter, 2-D or a stack `[E, rows, columns]`.
        cuts: name → row blocks to orthogonalise one by one (`groups.treatment`).
        momentum: μ.
        weight_decay: decoupled decay.
        dtype: dtype of the Newton–Schulz products; None lets the op choose.
    """

    def __init__(
        self,
        params: dict[str, Tensor],
        cuts: dict[str, tuple[Cut, ...]],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.params, self.cuts = params, cuts
        self.mu, self.weight_decay, self.dtype = momentum, weight_decay, dtype
        self.momentum = {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
        self._batches = self._plan()
        self._located: Batches | None = None

    def _plan(self) -> dict[tuple[int, int], list[_Block]]:
        """Group all blocks by shape, short side first: a tall block joins the wide ones transposed."""
        batches: dict[tuple[int, int], list[_Block]] = {}
        for index, (name, param) in enumerate(self.params.items()):
            for cut in self.cuts[name]:
                columns = param.shape[-1]
                key = (min(cut.rows, columns), max(cut.rows, columns))
                batches.setdefault(key, []).append(_Block(index, cut, cut.rows <= columns))
        return batches

    def prepare(self) -> Batches | None:
        """Note where gradients, momenta and weights lie, for the kernels of a GPU; None where plain torch runs.

        Called before each `step`, or once for a step that is recorded: then what this returns has to be kept, and the
        gradients have to stay where they are.
        """
        params = list(self.params.values())
        self._located = None
        if params and all(p.dtype is torch.float32 and p.is_contiguous() for p in params):
            choice = choose_triton(*params)
            if choice is not None and choice.implementation == "triton":
                self._located = Batches(params, list(self.momentum.values()), self._members())
        return self._located

    def _members(self) -> list[tuple[int, Cut]]:
        return [(index, cut) for index, name in enumerate(self.params) for cut in self.cuts[name]]

    @torch.no_grad()
    def step(self, lr: float | Tensor, scale: Tensor | None = None) -> None:
        """Update every parameter from its `.grad` (a missing gradient counts as zero).

        Args:
            lr: learning rate, or a Tensor `[]` that has it on the parameters' device.
            scale: `[]`, on the gradients; None = 1.
        """
        if not self.params:
            return
        if self._located is not None:
            located, self._located = self._located, None  # it keeps the gradients
            lr = lr if isinstance(lr, Tensor) else torch.tensor(lr, device=located.device)
            located.step(lr, scale, self.mu, self.weight_decay, self.dtype or torch.float32)
            return
        params = list(self.params.values())
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
        if scale is not None:
            torch._foreach_mul_(grads, scale)
        momenta = list(self.momentum.values())
        torch._foreach_mul_(momenta, self.mu)
        torch._foreach_add_(momenta, grads)
        nesterov = torch._foreach_add(grads, momenta, alpha=self.mu)
        torch._foreach_mul_(params, 1.0 - lr * self.weight_decay)
        for (short, long), members in self._batches.items():
            stacked = [self._short_first(nesterov[m.param], m) for m in members]
            orthogonal = newton_schulz(torch.cat(stacked), dtype=self.dtype)
            factor = lr * 0.2 * math.sqrt(long)
            start = 0
            for m in members:
                part = orthogonal[start : start + m.cut.count]
                start += m.cut.count
                part, target = part if m.wide else part.mT, blocks(params[m.param], m.cut)
                if isinstance(factor, Tensor):
                    target.addcmul_(part, factor, value=-1)
                else:
                    target.sub_(part, alpha=factor)
            assert start == orthogonal.shape[0], f"batch of {short}x{long}: {orthogonal.shape[0]} blocks, used {start}"

    @staticmethod
    def _short_first(matrix: Tensor, member: _Block) -> Tensor:
        view = blocks(matrix, member.cut)
        return view if member.wide else view.mT
