"""The products inside one chunk: P = tril(q k^T with decay), L = its strictly lower twin for keys, and the inverse.

With G the inclusive cumulative log-decay of the chunk, a pair of rows r >= c meets with the factor exp(G_r - G_c) <= 1 on
each key channel. It is split as exp(G_r - a) exp(a - G_c) with an anchor a that is G of a row *between* them or of r
itself, never of a later row: later tokens cannot change earlier outputs by a single bit, and both factors stay in range:

    blocks of rows below another   a = G at the first row of the lower block: both factors <= 1, exact for any g <= 0
    a diagonal tile of 16 rows     a = G at its first row: the key factor reaches exp(15 |g|), safe for g >= -5

Without that bound (softplus gate) the diagonal tile is halved again and again by the first rule, down to single rows.
(kernels §2.3, §2.5.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16


@dataclass
class Pair:
    """One set of equal blocks of P and L: rows `query` against rows `key`, both as index pairs into a folded view.

    Attributes:
        size: rows m of a block.
        diagonal: True for diagonal tiles, False for a block below another.
        q_decay: exp(G - a) on the query rows `[..., blocks, m, K]`.
        k_decay: exp(a - G) on the key rows.
    """

    size: int
    diagonal: bool
    q_decay: Tensor
    k_decay: Tensor

    def query_rows(self, x: Tensor) -> Tensor:
        """View of the query rows of `x` `[..., C, D]` as `[..., blocks, m, D]`."""
        return fold(x, self.size, self.diagonal, 1)

    def key_rows(self, x: Tensor) -> Tensor:
        """View of the key rows of `x` `[..., C, D]` as `[..., blocks, m, D]`."""
        return fold(x, self.size, self.diagonal, 0)

    def block(self, x: Tensor) -> Tensor:
        """View of this pair's blocks of a `[..., C, C]` matrix as `[..., blocks, m, m]`."""
        if self.diagonal:
            tiles = x.unflatten(-2, (-1, self.size)).unflatten(-1, (-1, self.size))  # [..., b, m, b, m]
            return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        halves = x.unflatten(-2, (-1, 2, self.size)).unflatten(-1, (-1, 2, self.size))  # [..., b, 2, m, b, 2, m]
        return halves[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def fold(x: Tensor, size: int, diagonal: bool, half: int) -> Tensor:
    """Rows of `[..., C, D]` as blocks of `size`; off the diagonal the first (0) or the second (1) of each two."""
    if diagonal:
        return x.unflatten(-2, (-1, size))
    return x.unflatten(-2, (-1, 2, size)).select(-3, half)


def tail_sums(g: Tensor) -> Tensor:
    """Sum of the log-decays after each row, `[..., rows, K]`; summed from the end, so nothing large is subtracted."""
    after = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], dim=-2)
    return after.flip(-2).cumsum(-2).flip(-2)


def pairs(g: Tensor, bounded: bool) -> Iterator[Pair]:
    """The block pairs that together cover the lower triangle of a chunk, from its log-decays g `[..., C, K]`.

    When `bounded` is False the diagonal itself is left out: its decay is 1, see `intra_products`. Exponents are summed
    within their own block: as a difference of two cumulative sums they would keep the rounding error of the larger.
    """
    rows = g.shape[-2]
    size = 1
    if bounded:
        size = min(TILE, rows)
        tile = g.unflatten(-2, (-1, size))
        relative = tile.cumsum(-2) - tile[..., :1, :]
        yield Pair(size, True, relative.exp(), relative.neg().exp())
    while size < rows:
        lower, upper = fold(g, size, False, 1), fold(g, size, False, 0)
        anchor = lower[..., :1, :]
        since_anchor = torch.cat([torch.zeros_like(anchor), lower[..., 1:, :]], dim=-2).cumsum(-2)
        yield Pair(size, False, since_anchor.exp(), (tail_sums(upper) + anchor).exp())
        size *= 2


def intra_products(q: Tensor, k: Tensor, beta: Tensor, g: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
    """P `[..., C, C]` (lower triangular, diagonal included) and L (strictly lower, rows multiplied by beta)."""
    rows = q.shape[-2]
    P, L = q.new_zeros(*q.shape[:-1], rows), q.new_zeros(*q.shape[:-1], rows)
    for pair in pairs(g, bounded):
        keys = (pair.key_rows(k) * pair.k_decay).transpose(-1, -2)
        scores = (pair.query_rows(q) * pair.q_decay) @ keys
        corrections = (pair.query_rows(k) * pair.q_decay) @ keys
        pair.block(P).copy_(scores.tril() if pair.diagonal else scores)
        pair.block(L).copy_(corrections.tril(-1) if pair.diagonal else corrections)
    P.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    return P, L * beta.unsqueeze(-1)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower `[..., C, C]`: forward substitution in tiles of 16, then merged block by block.

    No Neumann series: on identical keys its terms grow like binomials before they cancel (traps T02, kernels §2.6).
    """
    rows = L.shape[-1]
    if rows <= TILE:
        eye = torch.eye(rows, dtype=L.dtype, device=L.device)
        return torch.linalg.solve_triangular(L + eye, eye.expand_as(L), upper=False, unitriangular=True)
    half = rows // 2
    A = torch.zeros_like(L)
    top = A[..., :half, :half] = unit_lower_inverse(L[..., :half, :half])
    bottom = A[..., half:, half:] = unit_lower_inverse(L[..., half:, half:])
    A[..., half:, :half] = -(bottom @ L[..., half:, :half] @ top)
    return A
