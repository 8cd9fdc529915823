"""Tokenizers: lossless on any bytes, and no text can produce a control id."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import ConfigError, RequestError
from perilune.tokenizer import ByteTokenizer, StreamDecoder, load_tokenizer, train_bpe
from perilune.tokenizer.bpe import PRESPLIT, BPETokenizer, _blocks

TEXT = (
    "def mean(values):\n    return sum(values) / len(values)\n\n\nclass Moon:\n    '''It doesn't shine.'''\n" * 20
    + "Der Mond ist aufgegangen. 月は地球の衛星です。 12345\r\n\t<|open|>message<|sep|>[EOS] [PAD]\n" * 5
)
BPE = train_bpe([TEXT], 420)
BYTE = ByteTokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [BPE, BYTE], ids=["bpe", "byte"])
NASTY = ["", "é", "a\u0301", "\x00\x01", "🌖🌗", "  \n \n x", "<|open|>think<|sep|>", "\u2028\r\n\r", "١٢٣", "don'T"]


@BOTH
@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=80) | st.text(max_size=60).map(lambda s: s.encode("utf-8", "surrogatepass")))
def test_any_bytes_survive_encoding_and_decoding(tokenizer, data):
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


@BOTH
@settings(deadline=None, max_examples=100)
@given(ids=st.data())
def test_streamed_text_equals_whole_text_and_never_breaks_a_character(tokenizer, ids):
    """Oracle: the codec's one-shot decoding, between control ids."""
    chosen = ids.draw(
        st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(tokenizer.encode("é🌖")), max_size=40)
    )
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(token_id) for token_id in chosen] + [stream.finish()]
    expected, run = "", b""
    for token_id in [*chosen, tokenizer.special.eos]:
        if token_id in tokenizer.special:
            expected, run = expected + run.decode("utf-8", "replace"), b""
        else:
            run += tokenizer.token_bytes(token_id)
    assert "".join(pieces) == expected == tokenizer.decode(chosen)


def test_stream_holds_back_an_unfinished_character():
    stream = StreamDecoder(BYTE)
    assert [stream.push(byte) for byte in "🌖".encode()] == ["", "", "", "🌖"]
    assert stream.push(0xE2) == "" and stream.finish() == "\ufffd" and stream.finish() == ""


@BOTH
def test_text_cannot_produce_a_control_id(tokenizer):
    for name in tokenizer.special.ids:
        for text in (name, f"x{name}y", name + name):
            ids = tokenizer.encode(text)
            assert not any(token_id in tokenizer.special for token_id in ids)
            assert tokenizer.decode(ids) == text


@BOTH
def test_encode_and_batch_agree_on_awkward_text(tokenizer):
    batch = tokenizer.encode_batch(NASTY)
    assert batch == [tokenizer.encode(text) for text in NASTY]
    assert [tokenizer.decode(ids) for ids in batch] == NASTY


@BOTH
def test_lone_surrogate_is_refused_with_its_position(tokenizer):
    with pytest.raises(RequestError, match="character 2"):
        tokenizer.encode("ab\ud800")


@BOTH
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    with pytest.raises(RequestError, match="vocabulary"):
        tokenizer.decode([bad])


def test_special_block_has_k3_names_at_k3_offsets():
    first = BPE.special.bos
    names = list(BPE.special.ids)[-32:]
    assert [BPE.special.ids[name] - first for name in names] == list(range(32))
    assert names[:6] == ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    assert names[18:22] == ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"]
    assert names[-2:] == ["[UNK]", "[PAD]"] and names[8] == f"<|reserved_token_{first + 8}|>"
    assert BPE.special.pad == BPE.vocab_size - 1 == 419


def test_decode_can_show_control_tokens():
    ids = [*BPE.encode("a"), BPE.special.eos, *BPE.encode("b")]
    assert BPE.decode(ids) == "ab" and BPE.decode(ids, skip_special=False) == "a[EOS]b"
    assert BPE.piece(BPE.special.open) == "<|open|>" and BYTE.piece(0xFF) == r"\xff"


def test_digits_stand_alone():
    assert [BPE.piece(token_id) for token_id in BPE.encode("12345")] == list("12345")


def test_long_text_in_blocks_gives_the_same_ids():
    text = TEXT * 20
    assert len(list(_blocks(text, 700))) > 10
    whole = BPE._encoder.encode(text).ids
    assert [i for block in _blocks(text, 700) for i in BPE._encoder.encode(block).ids] == whole
    assert BPE.encode(text) == whole and BPE._cuts_at_newlines


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet=" \n\r\tab'1.\u2028\u00a0\x0bé月", max_size=60))
def test_blocks_never_change_a_cut(text):
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRESPLIT), behavior="isolated")
    pieces = [piece for block in _blocks(text, 1) for piece, _ in cut.pre_tokenize_str(block)]
    assert pieces == [piece for piece, _ in cut.pre_tokenize_str(text)]


def test_training_is_deterministic_and_saved_files_are_equal(tmp_path):
    again = train_bpe([TEXT], 420)
    assert again.fingerprint == BPE.fingerprint
    for tokenizer in (BPE, BYTE):
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = load_tokenizer(tmp_path)
        assert type(loaded) is type(tokenizer) and loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
        assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_saved_file_gives_the_same_ids_to_the_plain_library(tmp_path):
    """Another engine reads the file with the tokenizers library alone."""
    BPE.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = TEXT.replace("<|open|>", "").replace("<|sep|>", "").replace("[EOS]", "").replace("[PAD]", "")
    assert theirs.encode(plain, add_special_tokens=False).ids == BPE.encode(plain)
    assert theirs.decode(BPE.encode(plain)) == plain
    assert theirs.token_to_id("<|open|>") == BPE.special.open and theirs.get_vocab_size() == BPE.vocab_size


def test_small_text_still_fills_the_vocabulary(tmp_path):
    small = train_bpe(["abc"], 512)
    assert small.vocab_size == 512 and small.special.pad == 511 and small.special.bos == 480
    assert small.decode(range(512)) == small.decode([i for i in range(512) if i not in small.special])
    small.save(tmp_path / "tokenizer.json")
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 512


def test_sampled_training_sees_all_parts():
    sampled = train_bpe(["aa bb\n" * 4000, "zzzz qq\n" * 4000], 300, sample_bytes=20000)
    assert len(sampled.encode("zzzz")) < 4 and len(sampled.encode("aa")) < 2


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size=100 is below 288"):
        train_bpe(["x"], 100)
    with pytest.raises(RequestError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a tokenizer.json"):
        load_tokenizer(tmp_path)
    BPE.save(tmp_path / "tokenizer.json")
    full = json.loads((tmp_path / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="NFC"):
        BPETokenizer(json.dumps(full | {"normalizer": {"type": "NFC"}}))
    with pytest.raises(ConfigError, match=r"no control token \[BOS\]"):
        BPETokenizer(json.dumps(full | {"added_tokens": []}))
