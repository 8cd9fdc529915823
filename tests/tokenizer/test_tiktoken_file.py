"""The reader of published rank files, against the `tiktoken` and `regex` libraries and hand-made cases."""

from __future__ import annotations

import base64
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_files import BYTES_IN_ORDER, K3_IDS, K3_RANKS, k3_rank_file, rank_file, small_rank_file

from perilune.errors import ConfigError, RequestError
from perilune.tokenizer import ByteTokenizer, StreamDecoder, TiktokenTokenizer, load_tokenizer, train_bpe
from perilune.tokenizer.tiktoken_file import PRESPLIT, RUN_CHARS, _pieces

tiktoken = pytest.importorskip("tiktoken", reason="the rank file reader needs tiktoken: pip install 'perilune[hf]'")

WORDS = ["message", " role", "user", "<|open|>", "open", "  ", "the", "\n\n", "月は", "é", "123", "12", "tion"]
SMALL = TiktokenTokenizer(small_rank_file(*WORDS))


def split_as(pieces):
    """A tokenizer whose vocabulary has exactly these pieces: a piece becomes one id only where the cut falls so."""
    tokens = list(dict.fromkeys([*BYTES_IN_ORDER, *(piece.encode() for piece in pieces)]))
    return TiktokenTokenizer(rank_file(tokens))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # 1: runs of Han, and nothing else with them
        ("我爱月亮", ["我爱月亮"]),
        ("月moon月", ["月", "moon", "月"]),
        ("a我b", ["a", "我", "b"]),
        ("月は地球", ["月", "は", "地球"]),
        # 2: upper* lower+, one leading character that is no letter, digit or newline, contraction
        ("HelloWorld", ["Hello", "World"]),
        (" hello", [" hello"]),
        ("(hello", ["(hello"]),
        ("don'T stop", ["don'T", " stop"]),
        ("we'LL've", ["we'LL", "'ve"]),
        ("a\u0301b", ["a\u0301b"]),
        ("naïve", ["naïve"]),
        ("\nhello", ["\n", "hello"]),
        # 3: upper+ lower*
        ("HELLO's", ["HELLO's"]),
        (" ABC", [" ABC"]),
        ("ABCdef", ["ABCdef"]),
        # 4: one to three digits, of any script
        ("1234567", ["123", "456", "7"]),
        ("a12", ["a", "12"]),
        (" 1", [" ", "1"]),
        ("١٢٣٤", ["١٢٣", "٤"]),
        # 5: punctuation with one space before and newlines behind
        (" !!\n\n", [" !!\n\n"]),
        ("?!x", ["?!", "x"]),
        ("<|open|>", ["<|", "open", "|>"]),
        ("🌖🌗", ["🌖🌗"]),
        # 6: spaces that end in newlines
        ("a \n\n b", ["a", " \n\n", " b"]),
        ("\r\n\r\n", ["\r\n\r\n"]),
        # 7: spaces but for the last, which belongs to the word
        ("a   b", ["a", "  ", " b"]),
        ("a   1", ["a", "  ", " ", "1"]),
        # 8: spaces at the end
        ("a   ", ["a", "   "]),
        ("\u3000\u3000", ["\u3000\u3000"]),
    ],
)
def test_each_alternative_of_the_presplit_cuts_where_it_should(text, pieces):
    assert "".join(pieces) == text
    tokenizer = split_as(pieces)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)] == pieces


ALPHABET = " \n\r\tabAB19'strelLvmd.,<|>é\u0301ǅʰ月一ك١\u3000\u2028🌖"


@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_presplit_agrees_with_another_engine(text):
    """Oracle: the `regex` library, whose set intersection is written the same way."""
    regex = pytest.importorskip("regex")
    pieces = regex.findall(PRESPLIT, text, flags=regex.VERSION1)
    assert "".join(pieces) == text
    ids = [token_id for piece in pieces for token_id in PAIRS.encode(piece)]
    assert PAIRS.encode(text) == ids
    tokenizer = split_as(pieces)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)] == pieces


# Every pair of characters merges, so that a cut in the wrong place changes the ids.
PAIRS = TiktokenTokenizer(
    rank_file(dict.fromkeys([*BYTES_IN_ORDER, *((a + b).encode() for a, b in itertools.product(ALPHABET, repeat=2))]))
)


@pytest.fixture(scope="module")
def published():
    return TiktokenTokenizer(k3_rank_file())


def test_control_tokens_are_at_the_published_ids(published):
    ids = published.special.ids
    assert published.vocab_size == 163_840 and len(ids) == 256
    assert min(ids.values()) == K3_RANKS == ids["[BOS]"] == 163_584
    expected = {
        "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589,
        "[start_header_id]": 163590, "[end_header_id]": 163591, "[EOT]": 163593, "<|media_begin|>": 163602,
        "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605, "<osagent_mode>": 163649,
        "[UNK]": 163838, "[PAD]": 163839, "<|reserved_token_163592|>": 163592, "<|reserved_token_163837|>": 163837,
    }  # fmt: skip
    assert {name: ids[name] for name in expected} == expected
    assert sum(not name.startswith("<|reserved_token_") for name in ids) == 16
    assert published.special.name(163_649) == "<osagent_mode>"


def test_strings_of_the_published_vocabulary_get_their_ids(published):
    for string, token_id in K3_IDS.items():
        assert published.encode(string) == [token_id] and published.decode([token_id]) == string


def test_tokens_are_reached_by_merges_not_only_as_whole_pieces():
    """ " xmessage" is one piece that is not in the vocabulary, so only merges can find what is inside."""
    ids = SMALL.encode("xmessage")
    assert [SMALL.token_bytes(i) for i in ids] == [b"x", b"message"]


def test_ids_are_those_of_the_plain_library(tmp_path, monkeypatch):
    """Oracle: tiktoken's own reader and encoder on the same file."""
    from tiktoken.load import load_tiktoken_bpe

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # else a file of an earlier run at the same path would be read
    path = tmp_path / "tiktoken.model"
    path.write_bytes(small_rank_file(*WORDS))
    ranks = load_tiktoken_bpe(str(path))
    theirs = tiktoken.Encoding("theirs", pat_str=PRESPLIT, mergeable_ranks=ranks, special_tokens={})
    for text in ["the message\n\n of the user 12345 月は é <|open|>tion", "", "\x00\x01", "  \n \n x"]:
        assert SMALL.encode(text) == theirs.encode(text, disallowed_special=())


@given(data=st.binary(max_size=80) | st.text(max_size=60).map(lambda s: s.encode("utf-8", "surrogatepass")))
def test_any_bytes_survive(data):
    assert SMALL.decode_bytes(SMALL.encode_bytes(data)) == data


def test_text_of_a_control_token_cannot_produce_a_control_id(published):
    for tokenizer in (SMALL, published):
        first = tokenizer.special.bos
        for name in list(tokenizer.special.ids)[:30] + ["<osagent_mode>", "[PAD]"]:
            for text in (name, f"x{name}y", name + name, f"<|{name}"):
                ids = tokenizer.encode(text)
                assert max(ids) < first and tokenizer.decode(ids) == text


def test_the_rest_of_the_interface():
    batch = ["", "the é", "x" * 100_000, "🌖"]
    assert SMALL.encode_batch(batch) == [SMALL.encode(text) for text in batch]
    assert [SMALL.decode(ids) for ids in SMALL.encode_batch(batch)] == batch
    assert [SMALL.token_bytes(SMALL.byte_id(b)) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert SMALL.byte_lengths()[SMALL.special.open] == 0 and SMALL.byte_lengths()[SMALL.encode("the")[0]] == 3
    assert SMALL.piece(SMALL.special.open) == "<|open|>"
    stream = StreamDecoder(SMALL)
    assert "".join([stream.push(i) for i in SMALL.encode("🌖é")]) + stream.finish() == "🌖é"
    with pytest.raises(RequestError, match="character 2"):
        SMALL.encode("ab\ud800")
    for bad in (-1, SMALL.vocab_size):
        with pytest.raises(RequestError, match="vocabulary"):
            SMALL.decode([bad])


def split_one_by_one(text, block=400_000, longest=25_000):
    """The release's cuts, character by character."""
    for begin in range(0, len(text), block):
        part, start, length, kind = text[begin : begin + block], 0, 0, None
        for i, char in enumerate(part):
            length, kind = (length + 1 if char.isspace() == kind else 1), char.isspace()
            if length > longest:
                yield part[start:i]
                start, length = i, 1
        yield part[start:]


@pytest.mark.parametrize(
    "text",
    [
        "x" * 25_000, "x" * 25_001, " " * 75_003, "ab " * 9_000, "x" * 24_999 + " " + "y" * 50_001, "a b" + "\n" * 60_000 + "c",
        "x" * 399_990 + " " * 20 + "y" * 30_000, "\x1c" * 26_000,
    ],
    ids=lambda text: str(len(text)),
)  # fmt: skip
def test_long_texts_are_cut_as_the_release_cuts_them(text):
    pieces = list(_pieces(text))
    assert pieces == list(split_one_by_one(text)) and "".join(pieces) == text


@pytest.mark.parametrize("char", ["x", " ", "\t", "月", "=", "\n", "1"])
def test_a_million_characters_without_a_break_encode(char):
    """Without cuts the library's regular expressions overflow their stack on the spaces."""
    assert RUN_CHARS < 1_000_000
    ids = SMALL.encode(char * 1_000_000)
    assert SMALL.decode_bytes(ids) == (char * 1_000_000).encode()


def test_saved_file_loads_again_under_any_name(tmp_path):
    for name in ("tiktoken.model", "tokenizer.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        SMALL.save(folder / name)
        for path in (folder, folder / name):
            loaded = load_tokenizer(path)
            assert isinstance(loaded, TiktokenTokenizer) and loaded.fingerprint == SMALL.fingerprint
            assert loaded.encode("the message") == SMALL.encode("the message")
    assert TiktokenTokenizer(small_rank_file("the")).fingerprint != SMALL.fingerprint


def test_file_kind_is_told_by_content(tmp_path):
    for tokenizer in (ByteTokenizer(), train_bpe(["abc"], 300)):
        tokenizer.save(tmp_path / "tokenizer.json")
        assert type(load_tokenizer(tmp_path)) is type(tokenizer)
    (tmp_path / "notes.txt").write_text("hello there\n")
    with pytest.raises(RequestError, match="tiktoken.model"):
        load_tokenizer(tmp_path / "notes.txt")
    (tmp_path / "sentencepiece.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00")
    with pytest.raises(ConfigError, match="line 2"):
        load_tokenizer(tmp_path / "sentencepiece.model")


GOOD = small_rank_file("ab")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the rank file is empty"),
        (GOOD + b"YWJj\n", "line 258 is 'YWJj'; each line must be a token in base64, a space, and its rank"),
        (GOOD + b"YWJj -1\n", "line 258"),
        (GOOD + b"YW!j 257\n", "line 258: 'YW!j' is not base64"),
        (GOOD + b"YWJ 257\n", "is not base64"),
        (GOOD + b"YWJj 256\n", "line 258 gives rank 256 a second time"),
        (GOOD + b"YWI= 257\n", r"line 258 has the token b'ab' of line 257 again"),
        (GOOD + b"YWJj 300\n", "has no rank 257, though its 258 ranks go up to 300"),
        (GOOD[:-4], "line 257"),
        (GOOD.replace(b"IQ== 0\n", base64.b64encode(b"zz") + b" 0\n"), "lacks single-byte tokens for 1 of 256 bytes, e.g. 33"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_with_the_place(content, message):
    with pytest.raises(ConfigError, match=message):
        TiktokenTokenizer(content)


def test_blank_lines_and_crlf_are_fine():
    assert TiktokenTokenizer(GOOD.replace(b"\n", b"\r\n") + b"\r\n").fingerprint == TiktokenTokenizer(GOOD).fingerprint


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match=r"pip install 'perilune\[hf\]'"):
        TiktokenTokenizer(GOOD, "my.model")
