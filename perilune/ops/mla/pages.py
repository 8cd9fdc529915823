"""Attention of one new token of each of several sequences against cached latents that lie in pages.

The sequences may have any lengths: this is what a serving engine decodes with. The arithmetic is that of
`latent.attend_latent` for each sequence alone. On a CPU a result does not depend on the other sequences; on a GPU, where all
cached tokens are dealt out evenly (see `device`), its last bits do.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.mla import native
from perilune.ops.mla.decode import attend_cached
from perilune.ops.mla.kernel_choice import PAGE
from perilune.ops.mla.latent import attend_latent


@dataclass(slots=True)
class PageTables:
    """Lengths and pages as the kernels on a GPU read them, int32, kept for all layers of one forward pass.

    Attributes:
        length_B: see `attend_latent_pages`.
        table_BP: numbers of pages of the pool.
    """

    length_B: Tensor | None = None
    table_BP: Tensor | None = None

    def of(self, length_B: Tensor, table_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Both in int32, converted at the first call."""
        if self.length_B is None or self.table_BP is None:
            self.length_B, self.table_BP = length_B.int(), table_BP.int()
        return self.length_B, self.table_BP


def select(q_nope_BHn: Tensor, entry_PSC: Tensor, w_uk_HnL: Tensor) -> Choice:
    """Return which implementation `attend_latent_pages` takes for these operands, and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    if entry_PSC.stride(2) != 1 or entry_PSC.stride(1) != entry_PSC.shape[2]:
        return Choice("torch", "the rows of a page are not dense")
    reason = native.why_no_decode(q_nope_BHn, entry_PSC, w_uk_HnL)
    return Choice("torch", reason) if reason else Choice("native", "one C call reads all sequences' pages as they lie")


def attend_latent_pages(
    q_nope_BHn: Tensor,
    q_rope_BHr: Tensor,
    entry_PSC: Tensor,
    table_BP: Tensor,
    length_B: Tensor,
    w_uk_HnL: Tensor,
    w_uv_HvL: Tensor,
    scale: float,
    tables: PageTables | None = None,
) -> Tensor:
    """Attention in the latent space, no gradient.

    Args:
        q_nope_BHn: `[B, H, n]` query part that meets the keys rebuilt from the latent.
        q_rope_BHr: `[B, H, r]` query part that meets the shared key channels.
        entry_PSC: `[pages, tokens of a page, L + r]`; of each cached token its latent, then its shared key channels.
        table_BP: int64 `[B, pages of the longest]`: each sequence's pages in order.
        length_B: int64 `[B]`: tokens of each sequence, the new one included; their entries are in the pages already.
        w_uk_HnL, w_uv_HvL: up-projections of keys `[H, n, L]` and values `[H, v, L]`.
        scale: factor on the scores.
        tables: where lengths and pages are kept between the layers of a forward pass.

    Returns:
        `[B, H, v]` in the queries' dtype; scores, softmax and sums in fp32 (fp64).
    """
    if select(q_nope_BHn, entry_PSC, w_uk_HnL).implementation == "native":
        return native.attend_latent_pages(
            q_nope_BHn, q_rope_BHr, entry_PSC, table_BP, length_B, w_uk_HnL, w_uv_HvL, scale
        )
    size, width = entry_PSC.shape[1], w_uk_HnL.shape[2]
    if entry_PSC.is_cuda and size % PAGE == 0:
        return attend_cached(
            q_nope_BHn[:, None],
            q_rope_BHr[:, None],
            entry_PSC,
            w_uk_HnL,
            w_uv_HvL,
            scale,
            *(tables or PageTables()).of(length_B, table_BP),
        )[:, 0]
    out = q_nope_BHn.new_empty(*q_nope_BHn.shape[:2], w_uv_HvL.shape[1])
    for row, length in enumerate(length_B.tolist()):
        entries = entry_PSC[table_BP[row, : -(-length // size)]].flatten(0, 1)[None, :length]
        latent, shared = entries[..., :width], entries[..., width:]
        q_nope, q_rope = q_nope_BHn[row][None, None], q_rope_BHr[row][None, None]
        out[row] = attend_latent(q_nope, q_rope, latent, shared, w_uk_HnL, w_uv_HvL, scale, length - 1)[0, 0]
    return out
