"""Chains of prompts that begin like earlier ones are those of `TokenChain`, and only what is new is hashed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perilune.errors import RequestError
from perilune.serve.cache import ImageKey, KnownPrompts, RootKey, TokenChain
from perilune.serve.cache.known import CANDIDATES, common

ROOT = RootKey(model="m")


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """Tokens of each call of `extend`."""
    seen: list[int] = []
    real = TokenChain.extend
    monkeypatch.setattr(TokenChain, "extend", lambda self, ids, *more: seen.append(len(ids)) or real(self, ids, *more))
    return seen


def same(chain: TokenChain, ids, root: RootKey = ROOT) -> bool:
    expected = TokenChain(root, chain.unit, ids)
    chain.extend([1, 2, 3] * 5)
    expected.extend([1, 2, 3] * 5)
    return chain.digests == expected.digests and len(chain) == len(expected)


def test_any_prompts_have_their_own_chains():
    rng, known, texts = random.Random(0), KnownPrompts(600), [[]]
    for _ in range(400):
        old = rng.choice(texts)
        ids = (old[: rng.randrange(len(old) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(20))])[:90]
        root = rng.choice((ROOT, RootKey(model="m", salt="s")))
        assert same(known.chain(root, 4, ids), ids, root)
        texts = [*texts[-30:], ids]
        held = sum(len(one[0]) for kept in known._known.values() for one in kept)
        assert held == known._held <= 600 and all(len(kept) <= CANDIDATES for kept in known._known.values())


def test_only_what_is_new_is_hashed(hashed):
    known, base = KnownPrompts(), list(range(1000))
    known.chain(ROOT, 8, base)
    hashed.clear()
    known.chain(ROOT, 8, [*base, *range(20)])
    assert sum(hashed) == 8 + 20
    hashed.clear()
    known.chain(ROOT, 8, [*base[:803], *range(100)])
    assert sum(hashed) == 8 + 3 + 100
    hashed.clear()
    known.chain(ROOT, 8, np.array([*base, *range(20), 5], dtype=np.uint32))
    assert sum(hashed) == 8 + 21 - 16, "two more units were known from the second prompt"


def test_images_and_short_prompts_are_hashed_as_ever():
    known, image = KnownPrompts(), ImageKey(2, 3, b"content")
    assert known.chain(ROOT, 4, range(20), [image]).digests == TokenChain(ROOT, 4, range(20), [image]).digests
    assert known.chain(ROOT, 4, range(7)).digests == TokenChain(ROOT, 4, range(7)).digests
    assert not known._known
    with pytest.raises(RequestError, match="token ids must be integers"):
        known.chain(ROOT, 4, [1, -1] * 8)


def test_common_beginnings():
    a = np.array([1, 2, 3, 4], np.uint32)
    assert [common(a, np.array(b, np.uint32)) for b in ([1, 2, 3, 4, 5], [1, 2, 9, 4], [7], [])] == [4, 2, 0, 0]
