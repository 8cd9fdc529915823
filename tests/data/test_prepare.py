"""From text to a run's tokens."""

from __future__ import annotations

import errno
from unittest import mock

import pytest

from perilune.data.document import Corpus, Document
from perilune.data.prepare import prepare, training_sources
from perilune.data.split import split
from perilune.errors import CapacityError, ConfigError
from perilune.tokenizer import load_tokenizer


def corpus(files=40, extra=""):
    texts = [
        f"def f{i}(x):\n    return x * {i} + é  # the {i}th of several functions of this module\n" * (1 + i % 7)
        for i in range(files)
    ]
    return Corpus.of(Document.of(f"r/m{i}.py", f"r/m{i}", text + extra) for i, text in enumerate(texts))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(corpus(), holdout=0.2, tokenizer="bpe", vocab_size=512, cache=tmp_path_factory.mktemp("cache"))


def test_both_parts_decode_to_the_split_documents(prepared):
    parts = split(corpus(), holdout=0.2)
    for store, documents in ((prepared.train, parts.train), (prepared.held_out, parts.held_out)):
        ids = store.read(0, store.num_tokens).tolist()
        assert prepared.tokenizer.decode_bytes(ids) == "".join(d.text for d in documents).encode()
        assert store.text_bytes.tolist() == [d.num_bytes for d in documents]
        assert ids.count(prepared.tokenizer.special.eos) == len(documents)
    assert prepared.held_out_bytes() == "".join(d.text for d in parts.held_out).encode()
    assert prepared.tokenizer.vocab_size == 512
    assert load_tokenizer(prepared.path).fingerprint == prepared.tokenizer.fingerprint


def test_the_tokenizer_has_not_seen_the_held_out_part(tmp_path):
    parts = split(corpus(), holdout=0.2)
    changed = Corpus.of([*parts.train, *(Document.of(d.name, d.group, "zzzyyy " * 200) for d in parts.held_out[:1])])
    one = prepare(
        Corpus.of([*parts.train, *parts.held_out[:1]]), holdout=0.2, tokenizer="bpe", vocab_size=400, cache=tmp_path
    )
    two = prepare(changed, holdout=0.2, tokenizer="bpe", vocab_size=400, cache=tmp_path)
    assert one.path != two.path and one.tokenizer.fingerprint == two.tokenizer.fingerprint


def test_equal_calls_share_the_cache_and_others_do_not(prepared, monkeypatch, tmp_path):
    cache = prepared.path.parent
    monkeypatch.setattr("perilune.data.prepare.train_bpe", None)
    again = prepare(corpus(), holdout=0.2, tokenizer="bpe", vocab_size=512, cache=cache)
    assert again.path == prepared.path and again.train.fingerprint == prepared.train.fingerprint
    byte = prepare(corpus(), holdout=0.2, tokenizer="byte", vocab_size=512, cache=cache)
    assert byte.path != prepared.path and byte.tokenizer.vocab_size == 288
    file = prepare(corpus(), holdout=0.2, tokenizer=str(prepared.path), vocab_size=600, cache=tmp_path)
    assert file.train.read(0, 50).tolist() == prepared.train.read(0, 50).tolist()
    with pytest.raises(ConfigError, match="has 512 ids, the model only 300"):
        prepare(corpus(), holdout=0.2, tokenizer=str(prepared.path), vocab_size=300, cache=tmp_path)


def test_an_interrupted_preparation_leaves_nothing_and_is_done_again(tmp_path, monkeypatch):
    call = {"holdout": 0.2, "tokenizer": "byte", "vocab_size": 512, "cache": tmp_path}
    full = OSError(errno.ENOSPC, "No space left on device")
    for failure, seen in ((full, CapacityError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr("perilune.data.prepare.write_atomic", mock.Mock(side_effect=failure))
            with pytest.raises(seen):
                prepare(corpus(), **call)
        assert list(tmp_path.iterdir()) == []
    assert prepare(corpus(), **call).train.num_tokens > 0


def test_training_sources(prepared):
    plain = training_sources(prepared)
    assert list(plain) == ["text"]
    mixed = training_sources(prepared, synthetic=["recall", "copy"], synthetic_fraction=0.25, long_document_weight=1.0)
    assert {name: weight for name, (_, weight) in mixed.items()} == {"text": 0.75, "synthetic": 0.25}
    assert mixed["text"][0].windows_per_epoch(16) > plain["text"][0].windows_per_epoch(16)
    with pytest.raises(ConfigError, match="unknown synthetic tasks"):
        training_sources(prepared, synthetic=["nope"], synthetic_fraction=0.1)
