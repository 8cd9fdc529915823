"""A shuffle that needs no memory: the i-th element of a permutation is computed, not looked up.

A Feistel network permutes the smallest power of four that holds n; outputs outside [0, n) are fed back in until one
is inside (cycle walking), which keeps the map a permutation of [0, n). Position i of epoch e is then a pure function of
(key, e, i), so a data loader's whole state is a step number.
"""

from __future__ import annotations

from collections.abc import Sequence

_MASK = (1 << 64) - 1
_ROUNDS = 6


def hash_integers(values: Sequence[int]) -> int:
    """A 64-bit hash of a few integers (splitmix64 finaliser, chained); equal on every machine."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permuted(index: int, size: int, key: Sequence[int]) -> int:
    """Element `index` of the permutation of `range(size)` that `key` chooses."""
    assert 0 <= index < size, f"index {index} outside a permutation of {size}"
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    seeds = [hash_integers([*key, round_]) for round_ in range(_ROUNDS)]
    while True:
        left, right = index >> half, index & low
        for seed in seeds:
            left, right = right, left ^ (hash_integers([seed, right]) & low)
        index = left << half | right
        if index < size:
            return index
