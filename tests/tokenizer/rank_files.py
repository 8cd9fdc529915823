"""Rank files made by the tests: no published file is committed."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

K3_RANKS = 163_584
K3_IDS = {
    "message": 2778, " role": 6244, '="': 878, '"': 1, "user": 2482, "assistant": 69702, "system": 14062, "think": 39964,
    "response": 12092, "tools": 25385, "call": 10257, "argument": 47185, "Hi": 18699,
}  # fmt: skip
"""Strings of the published vocabulary and their ids (architecture §10.2)."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES_IN_ORDER = [bytes([b]) for b in _PRINTABLE + [b for b in range(256) if b not in _PRINTABLE]]
"""The 256 bytes in the order in which byte-level vocabularies begin: `"` is 1."""


def rank_file(tokens: Iterable[bytes]) -> bytes:
    """Content of a rank file whose ids are the positions of `tokens`."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def merges(*words: str) -> list[bytes]:
    """Tokens that build each word from the left: for "abc" ab and abc."""
    return list(dict.fromkeys(word.encode()[:n] for word in words for n in range(2, len(word.encode()) + 1)))


def small_rank_file(*words: str) -> bytes:
    """All bytes, then the merges of `words`."""
    return rank_file([*BYTES_IN_ORDER, *merges(*words)])


def k3_rank_file(strings: Mapping[str, int] = K3_IDS, size: int = K3_RANKS) -> bytes:
    """A file of the published size that has `strings` at their published ids, and only unused tokens between.

    The parts of a string come before it, as in a trained vocabulary, so that merges can build it.
    """
    taken = {token_id: string.encode() for string, token_id in strings.items()}
    parts = [token for token in merges(*strings) if token not in taken.values()]
    first = [token for token in BYTES_IN_ORDER if token not in taken.values()] + parts
    tokens: list[bytes] = []
    queue = iter(first)
    for rank in range(size):
        token = taken.get(rank) or next(queue, None)
        tokens.append(token or b"\xff\xfe" + rank.to_bytes(3, "big"))
    return rank_file(tokens)
