"""Chunks of several sequences in one pass leave the pool, and give the scores, that each chunk alone does."""

from __future__ import annotations

import pytest
import torch
from tiny_model import tiny_model

from perilune.model import mla
from perilune.model.paged import PagedCache, PagedState
from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import ExportState
from perilune.serve.runner import PagePool, pool_geometry
from perilune.serve.runner.rows import chunk_rows

# Tokens before the chunk and behind it, and where states are written; pages have 20 tokens, windows three inputs.
CASES = {
    "short": [(0, 7, ()), (0, 1, ()), (0, 12, ())],
    "behind caches": [(25, 31, ()), (0, 40, ()), (39, 41, ()), (20, 40, ())],
    "with marks": [(0, 40, (2, 20)), (8, 9, ()), (0, 17, (16,)), (30, 45, (31, 40, 44))],
}


class Bench:
    """A pool of NaN whose first pages hold what a prefill of each sequence's past left there."""

    def __init__(self, model, cases) -> None:
        self.model = model
        self.geometry = pool_geometry(model.cfg, model.compute_dtype, unit=4)
        self.pool = PagePool(model.cfg, self.geometry, 80, model.compute_dtype, model.device)
        self.pool.bytes_PR.fill_(255)
        free = iter(range(80))
        size, groups = self.geometry.page_tokens, self.geometry.groups
        torch.manual_seed(0)
        self.ids = [torch.randint(0, 256, (end,)) for _, end, _ in cases]
        self.chunks = []
        for index, (start, end, marks) in enumerate(cases):
            pages, state = [next(free) for _ in range(-(-end // size))], tuple(next(free) for _ in range(groups))
            self.pool.bytes_PR[list(state)] = 0
            if start:
                self.run([self._chunk(pages, state, 0, start, ())], [index])
            exports = tuple(ExportState(mark, tuple(next(free) for _ in range(groups)), "test") for mark in marks)
            self.chunks.append(self._chunk(pages, state, start, end, exports))

    @staticmethod
    def _chunk(pages, state, start, end, exports) -> Chunk:
        return Chunk(
            request="r", step=0, start=start, end=end, pages=pages, state=state, operations=(), exports=exports
        )

    @torch.inference_mode()
    def run(self, chunks, indices) -> list[torch.Tensor]:
        """What comes out of the layers, for each chunk."""
        rows = chunk_rows(chunks, self.geometry.page_tokens, self.model.device)
        ids = torch.cat([self.ids[index][chunk.start : chunk.end] for index, chunk in zip(indices, chunks)])[None]
        hidden_BTD = self.model.hidden(ids, PagedState(self.pool.layers(rows), rows))
        return list(hidden_BTD[0].split([chunk.end - chunk.start for chunk in chunks]))


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_chunks_in_one_pass_are_chunks_alone(name: str, heads_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if heads_apart:
        monkeypatch.setattr(mla, "EXPANDED_BYTES", 1)
    model, cases = tiny_model(), CASES[name]
    together, alone = Bench(model, cases), Bench(model, cases)
    got = together.run(together.chunks, range(len(cases)))
    for index, chunk in enumerate(alone.chunks):
        (expected,) = alone.run([chunk], [index])
        torch.testing.assert_close(got[index], expected, rtol=0, atol=1e-10)
    theirs, ours = (bench.pool.bytes_PR.view(torch.float64) for bench in (alone, together))
    assert torch.equal(ours.isnan(), theirs.isnan()) and not theirs.isnan().all()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, equal_nan=True)


def test_nothing_behind_a_sequence_is_read() -> None:
    """What a page holds behind the last token, here NaN, is zero for the kernels, which multiply it by a weight of zero."""
    model, cases = tiny_model(), CASES["behind caches"]
    bench = Bench(model, cases)
    bench.run(bench.chunks, range(len(cases)))
    size = bench.geometry.page_tokens
    rows = chunk_rows(bench.chunks, size, model.device)
    cache = next(layer for layer in bench.pool.layers(rows) if isinstance(layer, PagedCache))
    entries_SC, first = cache.all_entries()[0], 0
    for (_, end, _), chunk in zip(cases, bench.chunks):
        alone = next(
            layer
            for layer in bench.pool.layers(chunk_rows([chunk], size, model.device))
            if isinstance(layer, PagedCache)
        )
        whole = -(-end // size) * size
        assert torch.equal(entries_SC[first : first + end], alone.entries(0)[0])
        assert not entries_SC[first + end : first + whole].any()
        first += whole
    assert first == len(entries_SC)
