"""What each layer keeps between calls: the one contract behind training chunks, prefill, decode and the prefix cache.

A KDA layer keeps a matrix a head and the last few raw projections: a fixed size, restorable only at the position where
it was saved. An MLA layer keeps `cache_width` numbers for each token, restorable at any boundary. Byte counts of both
have their home in `perilune.shapes.cache`.

A state belongs to its caller. Layers update it in place and return it; `clone` forks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from perilune.config import ModelConfig
from perilune.errors import RequestError


@dataclass
class RecurrentState:
    """State of a KDA or Gated DeltaNet layer.

    Attributes:
        window_BXW: last conv_kernel−1 raw projections of q|k|v, `[B, X, W-1]`.
        memory_BHVK: fp32 (fp64 for fp64 models) matrix of each head, `[B, H, V, K]`.
        marks: points inside a call where states are to be written besides; see `paged.PagedRecurrent`.
    """

    marks: ClassVar[tuple[int, ...]] = ()
    window_BXW: Tensor
    memory_BHVK: Tensor


@dataclass
class LatentCache:
    """Cache of an MLA layer: normalised latent and shared key channels of each token, `[B, capacity, L+r]`."""

    entries_BSC: Tensor


@dataclass
class KeyValueCache:
    """Cache of a plain softmax layer: rotated keys and values, `[B, capacity, H, K]` each."""

    keys_BSHK: Tensor
    values_BSHV: Tensor


LayerState = RecurrentState | LatentCache | KeyValueCache
_GROWING = (LatentCache, KeyValueCache)


class ModelState:
    """States of all layers for a batch of sequences, and how many tokens each sequence has.

    Attributes:
        layers: one state a layer, in order.
        lengths: tokens already seen by each row.
    """

    def __init__(self, layers: list[LayerState], lengths: list[int]) -> None:
        self.layers = layers
        self.lengths = lengths

    @staticmethod
    def zeros(
        cfg: ModelConfig,
        batch: int,
        capacity: int = 64,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> ModelState:
        """State before the first token.

        Args:
            cfg: the model.
            batch: rows B.
            capacity: tokens for which caches are allocated at once; they grow when needed.
            device: where the tensors live.
            dtype: of windows and caches; recurrent memories are fp32, or fp64 if dtype is.
        """

        def zeros(*shape: int, wide: bool = False) -> Tensor:
            kind = torch.promote_types(dtype, torch.float32) if wide else dtype
            return torch.zeros(batch, *shape, device=device, dtype=kind)

        def layer(kind: str) -> LayerState:
            if kind in ("kda", "gdn"):
                kda = cfg.kda
                return RecurrentState(
                    zeros(kda.conv_width, kda.conv_kernel - 1),
                    zeros(kda.num_heads, kda.value_dim, kda.head_dim, wide=True),
                )
            if kind == "mla":
                return LatentCache(zeros(capacity, cfg.mla.cache_width))
            size = (capacity, cfg.softmax.num_heads, cfg.softmax.head_dim)
            return KeyValueCache(zeros(*size), zeros(*size))

        return ModelState([layer(kind) for kind in cfg.layer_mixers], [0] * batch)

    @property
    def batch(self) -> int:
        """Rows B."""
        return len(self.lengths)

    @property
    def length(self) -> int:
        """Tokens seen by every row.

        Raises:
            RequestError: the rows differ; read `lengths` instead.
        """
        if len(set(self.lengths)) != 1:
            raise RequestError(f"rows of this state have different lengths {self.lengths}; read state.lengths")
        return self.lengths[0]

    def reserve(self, tokens: int) -> None:
        """Grow the caches so that each row can hold `tokens` tokens (at least doubling, so growth is amortised)."""
        if self.capacity is not None and self.capacity < tokens:
            self._grow(max(tokens, 2 * self.capacity))

    @property
    def capacity(self) -> int | None:
        """Tokens that the caches can hold; None if no layer has a cache."""
        sizes = [getattr(s, fields(s)[0].name).shape[1] for s in self.layers if isinstance(s, _GROWING)]
        return min(sizes) if sizes else None

    def _grow(self, capacity: int) -> None:
        for state in self.layers:
            if not isinstance(state, _GROWING):
                continue
            for f in fields(state):
                old = getattr(state, f.name)
                if old.shape[1] < capacity:
                    new = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
                    new[:, : old.shape[1]] = old
                    setattr(state, f.name, new)

    def advance(self, tokens: int) -> None:
        """Record that each row has seen `tokens` more tokens."""
        self.lengths = [length + tokens for length in self.lengths]

    def _map(self, change) -> list[LayerState]:
        return [type(s)(*(change(getattr(s, f.name)) for f in fields(s))) for s in self.layers]

    def clone(self) -> ModelState:
        """Return an independent copy: a fork of the sequences."""
        return ModelState(self._map(lambda t: t.clone()), list(self.lengths))

    def select(self, rows: Sequence[int]) -> ModelState:
        """Return a copy that holds the given rows, in that order (repeats fork a row)."""
        index = torch.tensor(list(rows))
        return ModelState(
            self._map(lambda t: t.index_select(0, index.to(t.device))), [self.lengths[row] for row in rows]
        )

    @staticmethod
    def stack(states: Sequence[ModelState]) -> ModelState:
        """Join states row-wise; their caches may have different capacities and their rows different lengths."""
        capacity = max(state.capacity or 0 for state in states)
        for state in states:
            state._grow(capacity)
        layers = [
            type(group[0])(*(torch.cat([getattr(s, f.name) for s in group]) for f in fields(group[0])))
            for group in zip(*(s.layers for s in states), strict=True)
        ]
        return ModelState(layers, [length for s in states for length in s.lengths])

    def nbytes(self) -> int:
        """Bytes held, allocated capacity included."""
        return sum(getattr(s, f.name).nbytes for s in self.layers for f in fields(s))
