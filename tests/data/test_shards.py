"""Token stores: what is written is read back across files, and half a store is no store."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.packing import IGNORE, count_windows, window
from perilune.data.shards import RepeatedDocuments, TokenStore, write_store
from perilune.errors import RequestError

EOS = 9


def write(path, documents, **options):
    settings_ = {"eos": EOS, "vocab_size": 10, "fingerprint": "f", "shard_tokens": 7} | options
    return write_store(path, [(ids, 3 * len(ids)) for ids in documents], **settings_)


def flat(documents):
    return [token for ids in documents for token in [*ids, EOS]]


DOCUMENTS = st.lists(st.lists(st.integers(0, 8), max_size=9), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(documents=DOCUMENTS, data=st.data())
def test_stream_equals_the_documents_end_to_end(tmp_path_factory, documents, data):
    store = write(tmp_path_factory.mktemp("s") / "store", documents)
    whole = flat(documents)
    assert store.num_tokens == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole) + 3))
    assert store.read(start, stop).tolist() == whole[start:stop]
    assert np.diff(store.offsets).tolist() == [len(ids) + 1 for ids in documents]
    assert store.text_bytes.tolist() == [3 * len(ids) for ids in documents]


@settings(deadline=None, max_examples=60)
@given(documents=DOCUMENTS, data=st.data())
def test_windows_against_a_slow_oracle(tmp_path_factory, documents, data):
    store = write(tmp_path_factory.mktemp("s") / "store", documents)
    whole = flat(documents)
    begins = set(np.cumsum([0] + [len(ids) + 1 for ids in documents]).tolist())
    if len(whole) < 2:
        return
    length = data.draw(st.integers(1, len(whole) - 1))
    start = data.draw(st.integers(0, len(whole) - 1 - length))
    got = window(store, start, length)
    for t in range(length):
        at = start + t
        assert got.ids[t] == whole[at]
        assert got.starts[t] == (at in begins)
        assert got.targets[t] == (IGNORE if at + 1 in begins else whole[at + 1])
    assert count_windows(store, length) == (len(whole) - 1) // length


@settings(deadline=None, max_examples=60)
@given(documents=DOCUMENTS, data=st.data())
def test_repeated_documents(tmp_path_factory, documents, data):
    store = write(tmp_path_factory.mktemp("s") / "store", documents)
    repeats = data.draw(st.lists(st.integers(0, 3), min_size=len(documents), max_size=len(documents)).filter(any))
    view = RepeatedDocuments(store, np.array(repeats))
    whole = flat([ids for r in range(3) for ids, n in zip(documents, repeats) if n > r])
    start = data.draw(st.integers(0, len(whole)))
    assert view.num_tokens == len(whole)
    assert view.read(start, len(whole) + 5).tolist() == whole[start:]
    assert view.offsets[-1] == len(whole) and len(view.offsets) == sum(repeats) + 1


def test_wide_vocabulary_takes_four_bytes(tmp_path):
    store = write(tmp_path / "s", [[70_000, 1]], vocab_size=163_840, eos=163_585)
    assert store.read(0, 3).tolist() == [70_000, 1, 163_585]
    assert (tmp_path / "s" / "tokens-00000.bin").stat().st_size == 12


def test_a_store_without_an_index_is_none(tmp_path):
    def documents():
        yield [1, 2], 6
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "s", documents(), eos=EOS, vocab_size=10, fingerprint="f")
    with pytest.raises(RequestError, match="not a token store"):
        TokenStore(tmp_path / "s")
    with pytest.raises(RequestError, match="no document"):
        write(tmp_path / "t", [])
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        write(tmp_path / "u", [[10]])


def test_damaged_stores_are_refused(tmp_path):
    with pytest.raises(RequestError, match="not a token store"):
        TokenStore(tmp_path)
    write(tmp_path / "s", [[1, 2, 3], [4]])
    file = tmp_path / "s" / "tokens-00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(RequestError, match="its index says 6"):
        TokenStore(tmp_path / "s")
