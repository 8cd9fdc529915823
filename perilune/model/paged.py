"""States that lie in pages of one pool: what a serving engine gives the layers instead of a `ModelState`.

A page holds cached tokens of every attention layer, or the states of as many recurrent layers; both are views of the same
bytes. The rows of a forward pass are described once, by `PagedRows`, and every layer reads the same description. Decoding
takes rows of different lengths, one token each. Chunks of several prompts lie one behind the other in a single row, see
`packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model.packing import Packing
from perilune.ops.mla.pages import PageTables


@dataclass(frozen=True, slots=True)
class Mark:
    """A point inside a chunk where the states of all recurrent layers are written.

    Attributes:
        chunk: of several chunks in a row, which one.
        offset: tokens of the chunk before it, below the chunk's length.
    """

    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the rows of one forward pass lie: B rows of T new tokens.

    Attributes:
        past: tokens that each row has already.
        page_N, slot_N: page, and place in it, of each new token, rows one behind the other (N = B T).
        table_BP: pages of each row's tokens in order; entries behind a row's last page mean nothing. Of several chunks the
            pages of all of them, in one row.
        length_B: tokens of each row, or of each chunk's sequence, the new ones included.
        state_GB: page of the states of each, for each cache group.
        marks: points where states are written, ascending; only with a single row.
        mark_GM: page of the states at each of them, for each cache group; None without any.
        packing: of several chunks one behind the other; None = rows of equally many tokens.
    """

    past: list[int]
    page_N: Tensor
    slot_N: Tensor
    table_BP: Tensor
    length_B: Tensor
    state_GB: Tensor
    marks: tuple[Mark, ...] = ()
    mark_GM: Tensor | None = None
    packing: Packing | None = None

    @property
    def tokens(self) -> int:
        """New tokens of each row, of all chunks together."""
        return len(self.page_N) // (1 if self.packing else len(self.past))


class PagedRecurrent:
    """A recurrent layer's states in pages; reads give copies, assignments write the pages.

    Args:
        memory_PHVK: the pool, seen as this layer's matrices `[pages, H, V, K]`.
        window_PHw: the same for the window: of each head its q, k and v channels, W-1 numbers each, `[pages, H, (2K+V)(W-1)]`.
        group: cache group of the layer.
        rows: of the forward pass.
    """

    def __init__(self, memory_PHVK: Tensor, window_PHw: Tensor, group: int, rows: PagedRows) -> None:
        self.memory_PHVK, self.window_PHw = memory_PHVK, window_PHw
        self._group, self._rows = group, rows
        self.page_B = rows.state_GB[group]

    @property
    def packing(self) -> Packing | None:
        """Where the chunks of several sequences lie; None = there is one, or rows of equally many tokens."""
        return self._rows.packing

    @property
    def marks(self) -> tuple[int, ...]:
        """Offsets in a single chunk at which `export` wants states."""
        return tuple(mark.offset for mark in self._rows.marks)

    @property
    def memory_BHVK(self) -> Tensor:
        """Matrices of the rows, `[B, H, V, K]`."""
        return self.memory_PHVK[self.page_B]

    @memory_BHVK.setter
    def memory_BHVK(self, value: Tensor) -> None:
        self.memory_PHVK[self.page_B] = value

    @property
    def window_BXW(self) -> Tensor:
        """Windows of the rows, `[B, X, W-1]`, channels in the order of the projection: q heads, k heads, v heads."""
        return self._by_projection(self.window_PHw[self.page_B])

    @window_BXW.setter
    def window_BXW(self, value: Tensor) -> None:
        self.window_PHw[self.page_B] = self._by_head(value)

    def export(self, window_MXW: Tensor, memory_MHVK: Tensor) -> None:
        """Write the states at all marks to their pages."""
        assert self._rows.mark_GM is not None, "marks have pages"
        page_M = self._rows.mark_GM[self._group]
        self.memory_PHVK[page_M] = memory_MHVK
        self.window_PHw[page_M] = self._by_head(window_MXW)

    def _parts(self, taps: int) -> tuple[int, int, int]:
        key, value = self.memory_PHVK.shape[3], self.memory_PHVK.shape[2]
        return key * taps, key * taps, value * taps

    def _by_projection(self, window_BHw: Tensor) -> Tensor:
        key, value = self.memory_PHVK.shape[3], self.memory_PHVK.shape[2]
        taps = window_BHw.shape[-1] // (2 * key + value)
        parts = window_BHw.split(self._parts(taps), dim=-1)
        return torch.cat([part.flatten(1) for part in parts], dim=-1).unflatten(-1, (-1, taps))

    def _by_head(self, window_BXW: Tensor) -> Tensor:
        batch, _, taps = window_BXW.shape
        heads = self.memory_PHVK.shape[1]
        flat, sizes = window_BXW.flatten(1), self._parts(taps)
        parts = flat.split([heads * size for size in sizes], dim=-1)
        return torch.cat([part.reshape(batch, heads, size) for part, size in zip(parts, sizes)], dim=-1)


class PagedCache:
    """An attention layer's cached tokens in pages.

    Args:
        entry_PSC: the pool, seen as this layer's entries `[pages, tokens of a page, C]`; C = latent and shared key channels
            of an MLA layer, or keys and values of a softmax layer.
        rows: of the forward pass.
    """

    def __init__(self, entry_PSC: Tensor, rows: PagedRows) -> None:
        self.entry_PSC = entry_PSC
        self.rows = rows
        self.tables: PageTables | None = (
            None  # the rows' lengths and pages as kernels read them, made once for all layers
        )

    @property
    def decodes(self) -> bool:
        """Whether the pass has one token of each of its rows."""
        return self.rows.packing is None and self.rows.tokens == 1

    def append(self, entry_BTC: Tensor) -> None:
        """Write the entries of the new tokens."""
        self.entry_PSC[self.rows.page_N, self.rows.slot_N] = entry_BTC.flatten(0, 1).to(self.entry_PSC.dtype)

    def entries(self, row: int) -> Tensor:
        """A copy of all entries of a row, the new ones included: `[1, S, C]`."""
        rows, size = self.rows, self.entry_PSC.shape[1]
        length = rows.past[row] + rows.tokens
        table = rows.table_BP[row, : -(-length // size)]
        return self.entry_PSC[table].flatten(0, 1)[None, :length]

    def all_entries(self) -> Tensor:
        """A copy of all entries of the sequences of several chunks, in whole pages, the new ones included: `[1, S, C]`; zeros
        behind each sequence's last one."""
        packing = self.rows.packing
        assert packing is not None, "a single sequence has no other pages beside it"
        pages_PSC = self.entry_PSC[self.rows.table_BP[0]]
        last_NSC = pages_PSC[packing.last_N]
        pages_PSC[packing.last_N] = last_NSC.masked_fill_(packing.beyond_NS[..., None], 0.0)  # NaN, it may be
        return pages_PSC.flatten(0, 1)[None]


class PagedState:
    """Stands in for a `ModelState` in `Transformer.hidden`.

    Args:
        layers: one state a layer, bound to the rows.
        rows: of this forward pass.
    """

    def __init__(self, layers: Sequence[PagedRecurrent | PagedCache], rows: PagedRows) -> None:
        self.layers = list(layers)
        self.lengths = [0] if rows.packing else list(rows.past)  # no layer that knows positions takes several chunks
        tables = PageTables()
        for layer in self.layers:
            if isinstance(layer, PagedCache):
                layer.tables = tables

    @property
    def batch(self) -> int:
        """Rows B."""
        return len(self.lengths)

    def reserve(self, tokens: int) -> None:
        """Pages were taken before the forward pass."""

    def advance(self, tokens: int) -> None:
        """Record that each row has `tokens` more tokens."""
        self.lengths = [length + tokens for length in self.lengths]
