"""Forward passes over pages as they are: any chunks, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from perilune.model import Transformer
from perilune.model.paged import PagedRows, PagedState
from perilune.model.vision import ImageRows
from perilune.serve.cache import Chunk
from perilune.serve.runner.pages import PagePool
from perilune.serve.runner.rows import chunk_rows
from perilune.serve.staging import to_device


class Passes:
    """Passes of a model over a pool. On a GPU they are launched, and nothing waits for them.

    Args:
        model: in eval mode; its device and compute dtype are used as they are.
        pool: of the same device and dtype.
        vocab_size: scores of ids beyond it, with which a model may be padded, are cut off.
    """

    def __init__(self, model: Transformer, pool: PagePool, vocab_size: int) -> None:
        self.model, self.pool, self.vocab_size = model, pool, vocab_size

    def alone(self, chunk: Chunk, tokens: Sequence[int], want: str = "last", images: ImageRows | None = None) -> Tensor:
        """A chunk of one sequence.

        Args:
            chunk: which part of which pages.
            tokens: its tokens.
            want: scores after "all" tokens `[T, Z]`, the "last" one `[1, Z]` or "none" `[0, Z]`.
            images: what takes the place of some tokens' embeddings.
        """
        return self.scores(to_device([tokens], self.model.device), self._rows([chunk]), want, images)[0]

    def together(self, chunks: Sequence[Chunk], tokens: Sequence[int], places: Sequence[int]) -> Tensor:
        """Chunks of several sequences, of any lengths, in one pass, by a model whose layers know no positions.

        Args:
            chunks: in any order.
            tokens: of all chunks, one behind the other.
            places: which of the tokens scores are wanted after, `N`.

        Returns:
            Scores `[N, Z]`.
        """
        device, rows = self.model.device, self._rows(chunks)
        hidden_BTD = self.model.hidden(to_device([tokens], device), PagedState(self.pool.layers(rows), rows))
        if not places:
            return hidden_BTD.new_empty(0, self.vocab_size)
        return self.model.lm_head(self.model.norm(hidden_BTD[0, to_device(places, device)]))[:, : self.vocab_size]

    def scores(self, ids_BT: Tensor, rows: PagedRows, want: str, images: ImageRows | None = None) -> Tensor:
        """Rows of equally many tokens; `want` and `images` as of `alone`. Returns scores `[B, T, 1 or 0, Z]`."""
        out = self.model(ids_BT, PagedState(self.pool.layers(rows), rows), logits=want, images=images)
        if out.logits_BTZ is None:
            return out.hidden_BTD.new_empty(len(ids_BT), 0, self.vocab_size)
        return out.logits_BTZ[..., : self.vocab_size]

    def _rows(self, chunks: Sequence[Chunk]) -> PagedRows:
        return chunk_rows(chunks, self.pool.geometry.page_tokens, self.model.device)
