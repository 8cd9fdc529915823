"""Where a head's state lies in a page, and which bytes go where when ranks of another number take a prefix over.

In a page of states there is one row for each attention layer, and in a row the heads of one recurrent layer lie one behind
the other: each with its matrix `[V, K]` and its channels of the convolution window. So a head is one run of bytes, the
smallest unit of a transfer, and another tensor-parallel size is a matter of which runs go to which rank: nothing is
rearranged on either side (report §5.4.1). Cached latents are the same on all ranks, but pages hold other numbers of tokens.

Plans are indices only. Pages are numbered within what is moved: 0 to `groups` - 1 for a checkpoint, entries of the table for
tokens; the executor knows the pool's page behind each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perilune.errors import ConfigError
from perilune.serve.cache.geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a checkpoint or a table: page, first byte in it, number of bytes."""

    page: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy an extent of one rank of the sender to one of equal length of a rank of the receiver."""

    source_rank: int
    source: Extent
    target_rank: int
    target: Extent


def head_extent(geometry: CacheGeometry, layer: int, head: int, heads: int = 1) -> Extent:
    """The bytes of one head, or of `heads` neighbouring ones, in a checkpoint.

    Args:
        geometry: of the rank.
        layer: counted among the recurrent layers.
        head: counted among the rank's heads.
        heads: how many.
    """
    assert 0 <= layer < geometry.recurrent_layers, f"layer {layer} of {geometry.recurrent_layers}"
    assert 0 <= head and head + heads <= geometry.heads, f"heads {head} to {head + heads} of {geometry.heads}"
    page, row = divmod(layer, geometry.attention_layers)
    return Extent(page, row * geometry.row_bytes + head * geometry.head_bytes, heads * geometry.head_bytes)


def state_moves(source: CacheGeometry, target: CacheGeometry) -> Iterator[Move]:
    """All moves that take a checkpoint from the ranks of one engine to those of another; each byte goes once.

    Raises:
        ConfigError: the two do not cache the same model in the same formats.
    """
    _check_same_model(source, target)
    for layer in range(source.recurrent_layers):
        head = 0
        while head < source.heads * source.tensor_parallel:
            source_rank, source_head = divmod(head, source.heads)
            target_rank, target_head = divmod(head, target.heads)
            count = min(source.heads - source_head, target.heads - target_head)
            yield Move(
                source_rank,
                head_extent(source, layer, source_head, count),
                target_rank,
                head_extent(target, layer, target_head, count),
            )
            head += count


def token_moves(source: CacheGeometry, target: CacheGeometry, start: int, end: int) -> Iterator[Move]:
    """All moves that take the cached tokens from `start` to `end` to every rank of another engine.

    Every rank of the sender has all of them; receivers are spread over the senders.

    Raises:
        ConfigError: the two do not cache the same model in the same formats.
    """
    _check_same_model(source, target)
    assert 0 <= start <= end, f"tokens {start} to {end}"
    for rank in range(target.tensor_parallel):
        for layer in range(source.attention_layers):
            token = start
            while token < end:
                there, here = _token(source, layer, token), _token(target, layer, token)
                left = min(end - token, *(g.page_tokens - token % g.page_tokens for g in (source, target)))
                length = left * source.token_bytes
                yield Move(
                    rank % source.tensor_parallel, Extent(*there, length), rank, Extent(*here, length)
                )  # fmt: skip
                token += left


def _token(geometry: CacheGeometry, layer: int, token: int) -> tuple[int, int]:
    page, slot = divmod(token, geometry.page_tokens)
    return page, layer * geometry.row_bytes + slot * geometry.token_bytes


def _check_same_model(source: CacheGeometry, target: CacheGeometry) -> None:
    for name in ("attention_layers", "recurrent_layers", "token_bytes", "head_bytes"):
        if getattr(source, name) != getattr(target, name):
            raise ConfigError(
                f"the sender has {name}={getattr(source, name)}, the receiver {getattr(target, name)}; "
                "both must serve the same model with the same cache formats"
            )
    if source.heads * source.tensor_parallel != target.heads * target.tensor_parallel:
        raise ConfigError(
            f"the sender has {source.heads} heads on each of {source.tensor_parallel} ranks, the receiver {target.heads} "
            f"on each of {target.tensor_parallel}; both must have the same heads in all"
        )
