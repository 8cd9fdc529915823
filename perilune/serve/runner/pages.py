"""The pool as bytes: one buffer of equal pages, seen as cached tokens or as states, and the operations on whole pages.

    page of tokens   for each attention layer a row: `page_tokens` entries, one behind the other
    page of states   in each row one recurrent layer: its heads one behind the other, of each the matrix [V, K] in fp32 and
                     its q, k and v channels of the convolution window

Nothing is converted: a checkpoint is the running state, byte for byte. Which page is what is `HybridCache`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.config import ModelConfig
from perilune.errors import CapacityError, ConfigError
from perilune.model.paged import PagedCache, PagedRecurrent, PagedRows
from perilune.serve.cache import CacheGeometry, CopyPage, RestoreState, ZeroState, cache_geometry
from perilune.serve.cache.plans import Operation
from perilune.serve.staging import to_device
from perilune.serve.tiers.memory import HostMemory, HostPage, runs

GPU_ROWS = 64  # rows of a chunk of the recurrence, and tokens of a page that the attention kernels read
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pool_geometry(
    cfg: ModelConfig, dtype: torch.dtype, *, unit: int | None = None, device: torch.device | None = None
) -> CacheGeometry:
    """Sizes of the cache of a model that computes in `dtype`: windows and tokens in that type, matrices in fp32 (fp64).

    Args:
        cfg: the model.
        dtype: float32, bfloat16, float16 or float64.
        unit: tokens of a hash unit; None = from the cost of a checkpoint.
        device: of the pool; on a GPU units, and so pages, are multiples of the tokens that its kernels take at once.

    Raises:
        ConfigError: another dtype, or see `cache_geometry`.
    """
    if device is not None and device.type == "cuda":
        plain = pool_geometry(cfg, dtype, unit=unit)
        if plain.unit % GPU_ROWS:
            unit = -(-plain.unit // GPU_ROWS) * GPU_ROWS
    if dtype is torch.float64:  # all numbers have twice the bytes of float32, so all ratios are the same
        single = cache_geometry(cfg, unit=unit, window="fp32", entry="fp32")
        return replace(single, token_bytes=2 * single.token_bytes, state_bytes=2 * single.state_bytes)
    if dtype not in _FORMATS:
        raise ConfigError(f"a cache in {dtype}; allowed: float32, bfloat16, float16, float64")
    return cache_geometry(cfg, unit=unit, window=_FORMATS[dtype], entry=_FORMATS[dtype])


class Spare(NamedTuple):
    """Numbers of the spare pages."""

    tokens: int
    states: int
    unread: int


class PagePool:
    """Pages of a model's cache on one device.

    Args:
        cfg: the model.
        geometry: of the pool; `pool_geometry` of the same dtype.
        pages: how many.
        dtype: of activations, windows and tokens.
        device: where the bytes are.

    Behind the pages lie spare ones, which nobody is given: rows that only fill a recorded pass up write there. What is read of
    them is finite.

    Attributes:
        bytes_PR: uint8 `[pages, page_bytes]`.
        spare: a page each for tokens, for states, and for states that nobody reads.

    Raises:
        CapacityError: the device has no room for it.
    """

    def __init__(
        self, cfg: ModelConfig, geometry: CacheGeometry, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry, self.pages = geometry, pages
        self.spare = Spare(pages, pages + 1, pages + 2)
        try:
            all_PR = torch.empty(pages + len(self.spare), geometry.page_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise CapacityError(
                f"no room on {device} for a cache of {pages} pages of {geometry.page_bytes} bytes; give it less memory "
                f"({error})"
            ) from None
        self.bytes_PR, self._all_PR = all_PR[:pages], all_PR
        all_PR[pages:] = 0
        self._host = HostMemory(geometry.page_bytes, pinned=device.type == "cuda")
        self._copies: torch.cuda.Stream | None = None  # to the pool, beside what runs
        rows = all_PR.view(len(all_PR), geometry.attention_layers, geometry.row_bytes)
        self._rows = rows
        attention = [kind for kind in cfg.layer_mixers if kind in ("mla", "softmax")]
        self._caches = [self._cache(rows, row, cfg, kind, dtype) for row, kind in enumerate(attention)]
        self._states = [self._state(rows, layer, cfg, dtype) for layer in range(geometry.recurrent_layers)]
        self._is_recurrent = [kind in ("kda", "gdn") for kind in cfg.layer_mixers]

    def _cache(self, rows: Tensor, row: int, cfg: ModelConfig, kind: str, dtype: torch.dtype) -> Tensor:
        """Entries of an attention layer in all pages, `[pages, tokens of a page, C]`."""
        width = cfg.mla.cache_width if kind == "mla" else 2 * cfg.softmax.num_heads * cfg.softmax.head_dim
        size = self.geometry.token_bytes // dtype.itemsize
        return rows[:, row].view(dtype).unflatten(-1, (self.geometry.page_tokens, size))[..., :width]

    def _state(self, rows: Tensor, layer: int, cfg: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
        """Matrices and windows of a recurrent layer in all pages, and its cache group."""
        group, row = divmod(layer, self.geometry.attention_layers)
        heads = rows[:, row, : self.geometry.state_bytes].unflatten(-1, (self.geometry.heads, self.geometry.head_bytes))
        wide = torch.promote_types(dtype, torch.float32)
        numbers = cfg.kda.value_dim * cfg.kda.head_dim
        matrix = heads[..., : numbers * wide.itemsize].view(wide)
        window = heads[..., numbers * wide.itemsize :].view(dtype)
        return matrix.unflatten(-1, (cfg.kda.value_dim, cfg.kda.head_dim)), window, group

    def layers(self, rows: PagedRows) -> list[PagedRecurrent | PagedCache]:
        """The states of all layers, bound to the rows of a forward pass."""
        states, caches = iter(self._states), iter(self._caches)
        return [
            PagedRecurrent(*next(states), rows) if recurrent else PagedCache(next(caches), rows)
            for recurrent in self._is_recurrent
        ]

    def operate(self, operations: Iterable[Operation]) -> None:
        """Do what the cache asks for before a request's first chunk, in order."""
        for operation in operations:
            match operation:
                case CopyPage(source, target, tokens):
                    size = tokens * self.geometry.token_bytes
                    self._rows[target, :, :size] = self._rows[source, :, :size]
                case ZeroState(targets):
                    self._all_PR[self._index(targets)] = 0
                case RestoreState(sources, targets):
                    self.copy(sources, targets)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages."""
        if self.bytes_PR.is_cuda:  # one launch each way
            self._all_PR[self._index(targets)] = self._all_PR[self._index(sources)]
            return
        for source, target in zip(sources, targets, strict=True):
            self._all_PR[target].copy_(self._all_PR[source])

    def _index(self, pages: Sequence[int]) -> Tensor:
        return to_device(list(pages), self.bytes_PR.device)

    def host_pages(self, count: int) -> list[HostPage]:
        """Memory of the host for so many pages, of any contents."""
        return self._host.take(count)

    def reserve_host(self, count: int) -> None:
        """Take memory of the host for so many pages in all, where that takes time: pinning does. CapacityError: there is less."""
        if self.bytes_PR.is_cuda:
            self._host.reserve(count)

    def read_bytes(self, pages: Sequence[int]) -> list[HostPage]:
        """Copy pages to the host. From a GPU the copies are left to it, behind what it was asked for so far."""
        places = self._host.take(len(pages))
        for page, block, place, count in runs(pages, places):
            source, target = self.bytes_PR[page : page + count], self._host.blocks[block][place : place + count]
            target.copy_(source, non_blocking=True)
        if places and self.bytes_PR.is_cuda:
            ready = torch.cuda.Event(blocking=True)
            ready.record()
            for place in places:
                place.ready = ready
        return places

    def write_bytes(self, pages: Sequence[int], contents: Sequence[HostPage]) -> Callable[[], None] | None:
        """Copy pages of the host into the pool.

        Returns:
            None if it is done; else, from a GPU that goes on beside it, what waits for it and may do so on any thread.
        """
        if not self.bytes_PR.is_cuda:
            self._fill(pages, contents)
            return None
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.bytes_PR.device)
        self._copies.wait_stream(torch.cuda.current_stream(self.bytes_PR.device))  # what read these pages last
        for ready in {content.ready for content in contents} - {None}:
            self._copies.wait_event(ready)
        with torch.cuda.stream(self._copies):
            self._fill(pages, contents)
            done = torch.cuda.Event(blocking=True)
            done.record()

        def wait() -> None:
            done.synchronize()
            kept.clear()

        kept = list(contents)  # their places are nobody else's until then
        return wait

    def _fill(self, pages: Sequence[int], contents: Sequence[HostPage]) -> None:
        for page, block, place, count in runs(pages, contents):
            source = self._host.blocks[block][place : place + count]
            self.bytes_PR[page : page + count].copy_(source, non_blocking=True)
