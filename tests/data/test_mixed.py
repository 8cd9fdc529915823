"""A corpus built from installed packages, its manifest, and reading it back."""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from perilune.data import mixed
from perilune.data.cleaning import clean, drop_near_duplicates
from perilune.data.corpus import read_paths
from perilune.data.document import Corpus, Document
from perilune.errors import RequestError


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("mixed") / "corpus"
    return out, mixed.build_mixed(out, ["pytest", "_pytest"])


def test_manifest_names_every_text_with_its_hash_and_licence(built):
    out, manifest = built
    assert manifest == json.loads((out / "manifest.json").read_text())
    origins = {row["package"]: row for row in manifest["origins"]}
    assert origins["pytest"]["version"] == metadata.version("pytest") and "MIT" in origins["pytest"]["licence"]
    assert origins["python standard library"]["licence"] == "PSF-2.0"
    assert origins["python standard library"]["version"] == platform.python_version()
    assert sum(row["documents"] for row in manifest["origins"]) == manifest["documents"] == len(manifest["files"])
    roots = {"stdlib": sysconfig.get_paths()["stdlib"], "site-packages": sysconfig.get_paths()["purelib"]}
    for file in manifest["files"][::50]:
        label, _, relative = file["name"].partition("/")
        data = Path(roots[label], relative).read_bytes()
        assert (file["sha256"], file["bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))


def test_the_corpus_reads_back_with_names_and_groups(built):
    out, manifest = built
    corpus = read_paths([out / "corpus.jsonl"])
    assert corpus.fingerprint == manifest["fingerprint"] and corpus.num_bytes == manifest["bytes"]
    groups = {document.group for document in corpus.documents}
    assert {"site-packages/pytest", "site-packages/_pytest", "stdlib/json"} <= groups
    assert all(clean(document.text) == document.text for document in corpus.documents[::100])


def test_an_existing_corpus_is_not_overwritten(built):
    with pytest.raises(RequestError, match="exists; remove it"):
        mixed.build_mixed(built[0])


def test_near_duplicates_after_the_first_are_left_out():
    lines = [f"a long line that only this one document holds, number {i}\n" for i in range(10)]
    documents = [
        Document.of("a", "a", "".join(lines)),
        Document.of("b", "b", "".join(lines[:8] + ["x" * 50 + "\n", "y" * 50])),
        Document.of("c", "c", "".join(lines[:9] + ["z" * 50])),
        Document.of("d", "d", "short"),
    ]
    corpus = drop_near_duplicates(Corpus.of(documents))
    assert [d.name for d in corpus.documents] == ["a", "b", "d"]
    assert corpus.left_out[0].name == "c" and "90%" in corpus.left_out[0].reason
