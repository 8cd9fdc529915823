"""Reading text: what is taken, in which order, and what the user is told when it cannot be."""

from __future__ import annotations

import json
import os
import sys

import pytest

from perilune.data.corpus import read_paths, site_packages, standard_library
from perilune.data.document import Corpus, Document
from perilune.errors import ConfigError, RequestError


def names(corpus):
    return [document.name for document in corpus.documents]


def test_standard_library_is_the_default_without_tests():
    corpus = standard_library()
    groups = {document.group for document in corpus.documents}
    assert {"stdlib/json", "stdlib/argparse", "stdlib/asyncio"} <= groups
    assert not any(
        part in ("test", "tests", "idle_test", "site-packages") for n in names(corpus) for part in n.split("/")
    )
    assert names(corpus) == sorted(names(corpus))
    assert corpus.num_bytes == sum(len(document.text.encode()) for document in corpus.documents) > 5_000_000


def test_site_packages_by_name():
    corpus = site_packages(["pytest"])
    assert {document.group for document in corpus.documents} == {"site-packages/pytest"}
    assert "site-packages/pytest/__init__.py" in names(corpus)
    with pytest.raises(RequestError, match="no sources of pytets are installed; did you mean pytest"):
        site_packages(["pytets"])


def test_directory_files_sorted_hidden_and_binary_left_out(tmp_path):
    root = tmp_path / "mine"
    (root / "b" / ".git").mkdir(parents=True)
    (root / "b" / ".git" / "config").write_text("hidden")
    (root / "b" / "z.md").write_text("Z\r\n", newline="")
    (root / "a.txt").write_text("A")
    (root / "c.bin").write_bytes(b"\0\x01")
    (root / "empty.txt").write_text(" \n")
    (root / "twin.txt").write_text("A")
    os.mkfifo(root / "pipe.txt")
    corpus = read_paths([root])
    assert [(d.name, d.group, d.text) for d in corpus.documents] == [
        ("mine/a.txt", "mine/a.txt", "A"),
        ("mine/b/z.md", "mine/b", "Z\r\n"),
    ]
    assert {(item.name, item.reason) for item in corpus.left_out} == {
        ("mine/c.bin", "binary"),
        ("mine/empty.txt", "empty"),
        ("mine/twin.txt", "same text as mine/a.txt"),
    }


def test_order_of_arguments_does_not_change_the_corpus(tmp_path):
    for name in "xyz":
        (tmp_path / f"{name}.txt").write_text(name)
    files = [tmp_path / f"{name}.txt" for name in "zxy"]
    assert read_paths(files) == read_paths(sorted(files))
    before = read_paths(files).fingerprint
    (tmp_path / "y.txt").write_text("changed")
    assert read_paths(files).fingerprint != before


def test_jsonl_records_are_documents(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two\\u2028x"}\n')
    corpus = read_paths([path])
    assert [(d.name, d.text) for d in corpus.documents] == [
        ("d.jsonl:00000001", "one"),
        ("d.jsonl:00000003", "two\u2028x"),
    ]
    path.write_text('{"body": "one"}\n')
    assert read_paths([path], field="body").documents[0].text == "one"
    with pytest.raises(RequestError, match=r"line 1 has no text in field 'text' \(it has \['body'\]\)"):
        read_paths([path])
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(RequestError, match="line 2 is not JSON"):
        read_paths([path])


def test_parquet_rows_are_documents(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra 'data') is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "d.parquet"
    parquet.write_table(arrow.table({"text": ["one", "two"], "n": [1, 2]}), path)
    assert [d.text for d in read_paths([path]).documents] == ["one", "two"]
    with pytest.raises(RequestError, match=r"no column 'body' \(it has \['text', 'n'\]\)"):
        read_paths([path], field="body")
    with pytest.raises(RequestError, match="row 0: column 'n' holds int"):
        read_paths([path], field="n")
    path.write_bytes(b"PAR1 broken")
    with pytest.raises(RequestError, match="as parquet"):
        read_paths([path])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'perilune\[data\]'"):
        read_paths([path])


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf8(tmp_path, bom):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(bom + b"caf\xe9\n")
    good = tmp_path / "good.txt"
    good.write_text("good")
    with pytest.raises(RequestError, match=rf"bad.txt is not UTF-8: byte 0xe9 at offset {len(bom) + 3}"):
        read_paths([bad, good])
    assert names(read_paths([bad, good], on_bad_text="skip")) == ["good.txt"]
    assert read_paths([bad], on_bad_text="replace").documents[0].text == "caf\ufffd\n"
    with pytest.raises(RequestError, match="no text in .*bad.txt.*not UTF-8"):
        read_paths([bad], on_bad_text="skip")
    with pytest.raises(ConfigError, match="allowed: error, skip, replace"):
        read_paths([good], on_bad_text="ignore")


def test_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    assert read_paths([tmp_path / "a.txt"]).documents[0].text == "hi"


def test_nothing_to_read(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match="no such file or directory: .*missing.txt"):
        read_paths([tmp_path / "missing.txt"])
    with pytest.raises(RequestError, match="no file matches"):
        read_paths([str(tmp_path / "*.md")])
    with pytest.raises(RequestError, match="no text in"):
        read_paths([tmp_path])
    with pytest.raises(RequestError, match="empty list"):
        read_paths([])
    (tmp_path / "a.txt").write_text("x")

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    with pytest.raises(RequestError, match="cannot read .*a.txt: Permission denied"):
        read_paths([tmp_path / "a.txt"])


def test_a_lone_surrogate_in_json_does_not_stop_the_run(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "a\ud800b"}) + "\n")
    assert read_paths([path]).documents[0].text == "a?b"


def test_fingerprint_sees_names_groups_and_contents():
    documents = [Document.of("a", "g", "x"), Document.of("b", "g", "y")]
    base = Corpus.of(documents).fingerprint
    assert base == Corpus.of(reversed(documents)).fingerprint
    for changed in (Document.of("c", "g", "y"), Document.of("b", "h", "y"), Document.of("b", "g", "z")):
        assert Corpus.of([documents[0], changed]).fingerprint != base
