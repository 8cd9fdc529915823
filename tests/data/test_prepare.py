"""From text to a run's tokens, and scoring held-out text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from perilune.data.document import Corpus, Document
from perilune.data.held_out import HeldOut
from perilune.data.packing import IGNORE
from perilune.data.prepare import prepare, training_sources
from perilune.data.split import split
from perilune.errors import ConfigError
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


def test_an_interrupted_preparation_is_done_again(tmp_path, monkeypatch):
    call = {"holdout": 0.2, "tokenizer": "byte", "vocab_size": 512, "cache": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr("perilune.data.prepare.write_atomic", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            prepare(corpus(), **call)
    assert prepare(corpus(), **call).train.num_tokens > 0


def test_training_sources(prepared):
    plain = training_sources(prepared)
    assert list(plain) == ["text"]
    mixed = training_sources(prepared, synthetic=["recall", "copy"], synthetic_fraction=0.25, long_document_weight=1.0)
    assert {name: weight for name, (_, weight) in mixed.items()} == {"text": 0.75, "synthetic": 0.25}
    assert mixed["text"][0].windows_per_epoch(16) > plain["text"][0].windows_per_epoch(16)
    with pytest.raises(ConfigError, match="unknown synthetic tasks"):
        training_sources(prepared, synthetic=["nope"], synthetic_fraction=0.1)


@pytest.mark.parametrize("seq_len", [7, 64, 100_000])
def test_held_out_windows_ask_for_every_token_once(prepared, seq_len):
    stream = prepared.held_out
    held_out = HeldOut(stream, prepared.token_bytes, seq_len=seq_len)
    asked = [batch.targets_BT[batch.targets_BT != IGNORE] for batch in held_out.batches(3)]
    whole = stream.read(0, stream.num_tokens)
    expected = np.delete(whole, stream.offsets[:-1])
    assert torch.cat(asked).tolist() == expected.tolist() and held_out.num_predicted == len(expected)
    assert held_out.num_unpredicted == len(stream.offsets) - 1
    assert held_out.num_bytes == len(prepared.held_out_bytes())


def test_a_uniform_model_costs_the_same_by_any_window(prepared):
    stream = prepared.held_out
    for seq_len, max_tokens in ((7, 0), (64, 0), (16, 160)):
        held_out = HeldOut(stream, prepared.token_bytes, seq_len=seq_len, max_tokens=max_tokens)
        tokens = held_out.num_predicted + held_out.num_unpredicted
        bits = held_out.bits_per_byte(held_out.num_predicted * math.log(512))
        assert math.isclose(bits, tokens * 9 / held_out.num_bytes)
        if max_tokens:
            assert max_tokens - seq_len < tokens <= max_tokens + 1, "the stream's last window may be short"
            batches = list(held_out.batches(4))
            assert sum(int((b.targets_BT != IGNORE).sum()) for b in batches) == held_out.num_predicted
        else:
            assert tokens == stream.num_tokens


def test_held_out_starts_and_padding(prepared):
    held_out = HeldOut(prepared.held_out, prepared.token_bytes, seq_len=50)
    batches = list(held_out.batches(1000))
    (batch,) = batches
    starts = batch.starts_BT.flatten()[: prepared.held_out.num_tokens - 1].nonzero().flatten().tolist()
    assert starts == prepared.held_out.offsets[:-1].tolist()
    assert int((batch.targets_BT[-1] == IGNORE).sum()) > 0
