"""Cleaning of text and up-sampling of long documents (report §3.4, our own rules: the report publishes none).

Each step is a pure function of the text. Source code must survive unchanged, so indentation and single blank lines are
left alone; what goes is what teaches nothing: control bytes, padding, and the same line over and over.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perilune.data.document import Corpus, Document, LeftOut, long_lines

MAX_BLANK_LINES = 3
MAX_LINE_REPEATS = 4
MAX_REPEATS_OF_LONG_DOCUMENT = 4

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_PADDING = re.compile(r"(?<=\S)[ \t]{32,}(?=\S)")


def clean(text: str) -> str:
    """Normalise one text; idempotent.

    Line ends become `\\n`; control characters (but tab, newline, form feed) and trailing spaces go; runs of more than
    3 blank lines, of 32 or more spaces inside a line, and of more than 4 equal lines are shortened to 3, 1 and 4.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", text)
    text = _PADDING.sub(" ", text)
    lines: list[str] = []
    for line, run in itertools.groupby([line.rstrip(" \t") for line in text.split("\n")]):
        lines += itertools.islice(run, MAX_LINE_REPEATS if line else MAX_BLANK_LINES)
    return "\n".join(lines)


def clean_corpus(corpus: Corpus) -> Corpus:
    """Every document cleaned; texts that become empty or equal are left out."""
    documents = [Document.of(document.name, document.group, clean(document.text)) for document in corpus.documents]
    return Corpus.of(documents, corpus.left_out)


def drop_near_duplicates(corpus: Corpus, *, max_shared: float = 0.8) -> Corpus:
    """Leave out each document of whose long lines more than `max_shared` stand in documents before it.

    This finds vendored copies and re-exports that an exact comparison misses. Short documents without a long line stay.
    """
    seen: set[str] = set()
    kept, left_out = [], list(corpus.left_out)
    for document in corpus.documents:
        lines = long_lines(document.text)
        shared = sum(line in seen for line in lines) / max(1, len(lines))
        if shared > max_shared:
            reason = f"{shared:.0%} of its long lines are in documents before it"
            left_out.append(LeftOut(document.name, reason, document.num_bytes))
        else:
            kept.append(document)
            seen.update(lines)
    return Corpus(tuple(kept), tuple(left_out))


def long_document_repeats(num_tokens: Sequence[int] | NDArray[np.int64], weight: float) -> NDArray[np.int64]:
    """How often each document stands in the training stream, so that long ones are seen more.

    A document of n tokens is repeated round((n / median)^weight) times, at least once and at most 4 times.

    Args:
        num_tokens: tokens of each document.
        weight: exponent; 0 = every document once.
    """
    lengths = np.asarray(num_tokens, dtype=np.float64)
    if lengths.size == 0 or weight == 0.0:
        return np.ones(lengths.shape, dtype=np.int64)
    relative = lengths / max(1.0, float(np.median(lengths)))
    return np.clip(np.rint(relative**weight), 1, MAX_REPEATS_OF_LONG_DOCUMENT).astype(np.int64)
