"""Sizes of the one pool: how many tokens a page holds, and how many pages a checkpoint of the KDA states takes.

A page is `page_tokens` cached tokens of every attention layer, or as many KDA states as there are attention layers: the
row that holds one layer's tokens is just large enough for one layer's state. So both kinds have the same bytes and share
one allocator. A checkpoint of all KDA layers takes `groups` pages (report §5.4.1; architecture §11.2).

For K3 in bf16 with fp32 states: a state of 6,512,640 B needs 5653.3 cached tokens of 1,152 B, rounded up to a multiple
of the 512-token hash unit: 6144 tokens. With tensor parallelism states are split by heads and latents replicated, which
gives 3072, 1536 and 1024 tokens for 2, 4 and 8 ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perilune.config import ModelConfig
from perilune.errors import ConfigError
from perilune.shapes.cache import BYTES, cache_bytes_per_token, recurrent_bytes

SMALLEST_UNIT, LARGEST_UNIT = 16, 512  # FlashKDA writes states at multiples of 16 tokens; the report's unit is 512
UNITS_PER_CHECKPOINT = 32  # a checkpoint costs as many bytes as the cached tokens of about this many units (K3: 31.7)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGeometry:
    """Sizes of one rank's cache. `cache_geometry` derives them from a model.

    Attributes:
        unit: tokens of a hash unit; a hit is a multiple of it.
        page_tokens: cached tokens of a page; a multiple of `unit`.
        attention_layers: layers that cache tokens.
        recurrent_layers: layers that keep a state (KDA or Gated DeltaNet).
        token_bytes: bytes that one attention layer caches for one token on this rank.
        state_bytes: bytes of one recurrent layer's state on this rank, short convolution included.
        heads: heads of a recurrent layer on this rank; 0 without recurrent layers.
        tensor_parallel: ranks that share the heads.

    Raises:
        ConfigError: `page_tokens` is no multiple of `unit`, or a row cannot hold a state.
    """

    unit: int
    page_tokens: int
    attention_layers: int
    recurrent_layers: int
    token_bytes: int
    state_bytes: int
    heads: int
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.unit < 1 or self.page_tokens < 1 or self.page_tokens % self.unit:
            raise ConfigError(
                f"page_tokens={self.page_tokens} must be a positive multiple of the hash unit {self.unit}"
            )
        if self.attention_layers < 1 or self.token_bytes < 1:
            raise ConfigError(
                f"a prefix cache needs a layer that caches tokens; attention_layers={self.attention_layers}, "
                f"token_bytes={self.token_bytes}"
            )
        if self.recurrent_layers and self.row_bytes < self.state_bytes:
            raise ConfigError(
                f"page_tokens={self.page_tokens} gives rows of {self.row_bytes} bytes, but a state has {self.state_bytes}; "
                f"at least {math.ceil(self.state_bytes / self.token_bytes)} tokens are needed"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one attention layer's tokens in a page, which also is the room of one state."""
        return self.page_tokens * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, of either kind."""
        return self.attention_layers * self.row_bytes

    @property
    def groups(self) -> int:
        """Pages of a checkpoint of all recurrent layers: its cache groups (K3: 3); 0 without recurrent layers."""
        return -(-self.recurrent_layers // self.attention_layers)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's state: its matrix and its channels of the convolution window."""
        return self.state_bytes // self.heads if self.heads else 0

    @property
    def cost_tokens(self) -> float:
        """Cached tokens whose bytes equal the states' of one checkpoint (K3: 16,254)."""
        return self.recurrent_layers * self.state_bytes / (self.attention_layers * self.token_bytes)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many cached tokens."""
        return -(-tokens // self.page_tokens)


def cache_geometry(
    cfg: ModelConfig,
    *,
    tensor_parallel: int = 1,
    unit: int | None = None,
    memory: str = "fp32",
    window: str = "bf16",
    entry: str = "bf16",
) -> CacheGeometry:
    """Sizes of the cache of a model on one rank.

    Args:
        cfg: the model.
        tensor_parallel: ranks that share the heads.
        unit: tokens of a hash unit; None = from the cost of a checkpoint, `default_unit`.
        memory, window, entry: formats of the state matrices, of the convolution window and of a cached token.

    Raises:
        ConfigError: the heads cannot be shared among so many ranks, or an unknown format.
    """
    for name, value in (("memory", memory), ("window", window), ("entry", entry)):
        if value not in BYTES:
            raise ConfigError(f"{name}={value!r} is not known; allowed: {', '.join(BYTES)}")
    if unit is not None and unit < 1:
        raise ConfigError(f"unit={unit} must be at least 1")
    recurrent = sum(kind in ("kda", "gdn") for kind in cfg.layer_mixers)
    attention = len(cfg.layer_mixers) - recurrent
    if "softmax" in cfg.layer_mixers and tensor_parallel > 1:
        raise ConfigError(
            f"a cache of plain softmax attention cannot be split; tensor_parallel={tensor_parallel}, use 1"
        )
    heads = cfg.kda.num_heads if recurrent else 0
    if tensor_parallel < 1 or heads % tensor_parallel:
        raise ConfigError(f"kda.num_heads={heads} cannot be shared by tensor_parallel={tensor_parallel} ranks")
    per_token = cache_bytes_per_token(cfg, entry=entry)
    token_bytes = per_token // attention
    if {"mla", "softmax"} <= set(cfg.layer_mixers):  # a page has equal rows: those of the wider kind
        widths = (cfg.mla.cache_width, 2 * cfg.softmax.num_heads * cfg.softmax.head_dim)
        token_bytes = max(widths) * BYTES[entry]
    states = recurrent_bytes(cfg, memory=memory, window=window)
    unit = unit or default_unit(states, per_token)
    state_bytes = states // recurrent // tensor_parallel if recurrent else 0
    return CacheGeometry(
        unit=unit,
        page_tokens=max(1, -(-state_bytes // (token_bytes * unit))) * unit,
        attention_layers=attention,
        recurrent_layers=recurrent,
        token_bytes=token_bytes,
        state_bytes=state_bytes,
        heads=heads // tensor_parallel,
        tensor_parallel=tensor_parallel,
    )


def default_unit(checkpoint_bytes: int, bytes_per_token: int) -> int:
    """Hash unit for a model whose checkpoint costs `checkpoint_bytes`: K3's ratio, as a power of two (K3: 512, nano: 16).

    Both counts are those of one rank without tensor parallelism, so that all ranks and both sides of a transfer hash
    the same units. A model without states gets the smallest unit: its hits cost nothing but their tokens.
    """
    ratio = checkpoint_bytes / bytes_per_token / UNITS_PER_CHECKPOINT
    return min(LARGEST_UNIT, max(SMALLEST_UNIT, 2 ** round(math.log2(max(ratio, 1.0)))))
