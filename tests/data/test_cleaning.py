"""Cleaning keeps code as it is, and up-sampling follows its formula."""

from __future__ import annotations

import inspect

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data import cleaning
from perilune.data.cleaning import clean, clean_corpus, long_document_repeats
from perilune.data.document import Corpus, Document


def test_source_code_is_unchanged():
    text = inspect.getsource(cleaning)
    assert clean(text) == text


def test_each_rule():
    assert clean("a\r\nb\rc") == "a\nb\nc"
    assert clean("a\x00b\x1b\x7fc\td\x0c") == "abc\td\x0c"
    assert clean("a \t\n  b  ") == "a\n  b"
    assert clean("x" + " " * 40 + "y") == "x y" and clean("x" + " " * 31 + "y") == "x" + " " * 31 + "y"
    assert clean("same\n" * 9 + "other\n") == "same\n" * 4 + "other\n"
    assert clean("a" + "\n" * 10 + "b") == "a\n\n\n\nb"
    assert clean(" " * 40 + "indented") == " " * 40 + "indented"


@settings(max_examples=200)
@given(text=st.text(alphabet="ab \t\n\r\x00", max_size=120))
def test_idempotent(text):
    assert clean(clean(text)) == clean(text)


def test_corpus_texts_that_become_equal_are_left_out():
    corpus = clean_corpus(
        Corpus.of([Document.of("a", "a", "x \n"), Document.of("b", "b", "x\n"), Document.of("c", "c", "\x00")])
    )
    assert [d.name for d in corpus.documents] == ["a"] and {i.name for i in corpus.left_out} == {"b", "c"}


def test_long_documents_are_repeated_up_to_four_times():
    lengths = [10, 100, 100, 200, 300, 10_000]
    assert long_document_repeats(lengths, 0.0).tolist() == [1] * 6
    median = np.median(lengths)
    expected = [min(4, max(1, round(n / median))) for n in lengths]
    assert long_document_repeats(lengths, 1.0).tolist() == expected == [1, 1, 1, 1, 2, 4]
    assert long_document_repeats([], 1.0).tolist() == []
