"""Digests of prefixes: equal exactly where everything that decides a state is equal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.serve.cache import ImageKey, RootKey, TokenChain

ROOT = RootKey(model="m")
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(ids=IDS, cuts=st.lists(st.integers(0, 60), max_size=5), unit=st.integers(1, 9))
def test_pieces_give_the_digests_of_the_whole(ids, cuts, unit):
    whole = TokenChain(ROOT, unit, ids)
    assert len(whole) == len(ids) and len(whole.digests) == len(ids) // unit
    chain = TokenChain(ROOT, unit)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in zip(edges, edges[1:]):
        chain = chain.copy()
        chain.extend(np.array(ids[start:end], np.uint32) if start % 2 else ids[start:end])
    assert chain.digests == whole.digests and len(chain) == len(whole)


@given(ids=IDS, other=IDS, unit=st.integers(1, 5))
def test_digests_agree_exactly_as_far_as_tokens_do(ids, other, unit):
    a, b = TokenChain(ROOT, unit, ids).digests, TokenChain(ROOT, unit, other).digests
    for index, (left, right) in enumerate(zip(a, b)):
        end = (index + 1) * unit
        assert (left == right) == (ids[:end] == other[:end])


def test_each_field_of_the_root_counts():
    base = RootKey(model="m", weights=1, numerics="bf16", lora="a", salt="b")
    others = [
        replace(base, model="n"), replace(base, weights=2), replace(base, numerics="fp8"), replace(base, lora="b"),
        replace(base, salt="a"), replace(base, lora="b", salt="a"), replace(base, lora="", salt="ab"),
        replace(base, lora="ab", salt=""), replace(base, lora="a4:salt:s:1:b", salt=""), replace(base, model="m\udc80"),
    ]  # fmt: skip
    assert len({key.digest() for key in [base, *others]}) == len(others) + 1
    assert base.digest() == replace(base).digest()


def test_kinds_of_fields_are_told_apart():
    """A version 1 and a version "1" from a caller that does not check types must not meet."""
    assert RootKey(model="m", weights=1).digest() != RootKey(model="m", weights="1").digest()


def image(start, digest=b"x", tokens=3):
    return ImageKey(start, tokens, digest)


def test_an_image_counts_from_the_unit_in_which_it_begins():
    ids = list(range(16))
    plain = TokenChain(ROOT, 4, ids).digests
    one, two = (TokenChain(ROOT, 4, ids, [image(6, digest)]).digests for digest in (b"x", b"y"))
    assert plain[0] == one[0] == two[0], "what stands before the image is shared"
    for index in (1, 2, 3):
        assert len({plain[index], one[index], two[index]}) == 3
    moved = [TokenChain(ROOT, 4, ids, [key]).digests[1] for key in (image(5), image(6, tokens=4), image(6))]
    assert len(set(moved)) == 3 and moved[2] == one[1]


def test_images_come_with_their_pads_in_any_pieces():
    ids, images = list(range(20)), [image(3), image(9, b"second"), image(10, b"third")]
    whole = TokenChain(ROOT, 4, ids, images[::-1]).digests
    chain = TokenChain(ROOT, 4, ids[:9], images[:1])
    twin = chain.copy()
    twin.extend(ids[9:], [image(9, b"another"), images[2]])
    assert twin.digests[:2] == whole[:2] and twin.digests[2] != whole[2]
    chain.extend(ids[9:10], images[1:2])
    chain.copy().extend(ids[10:], images[2:])
    chain.extend(ids[10:], images[2:])
    assert chain.digests == whole
    with pytest.raises(RequestError, match="begins at token 3, but the tokens that came with it are 20 to 20"):
        chain.extend([1], [image(3)])


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], [None], np.array([-1]), np.array([2**32])])
def test_ids_must_be_ids(ids):
    with pytest.raises(RequestError, match="token ids must be integers from 0 to 4294967295"):
        TokenChain(ROOT, 4, ids)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.int32, np.uint16, ">u4"])
def test_arrays_hash_as_lists_do(dtype):
    ids = np.arange(40, dtype=dtype)
    assert TokenChain(ROOT, 4, ids).digests == TokenChain(ROOT, 4, ids.tolist()).digests
    assert TokenChain(ROOT, 4, ids[::2]).digests == TokenChain(ROOT, 4, ids[::2].tolist()).digests
