"""Training part and held-out part, with nothing of the one in the other.

Whole groups (top-level modules, packages, files, records) are held out, chosen by a hash of their name, so a group stays
on its side when the corpus grows. A held-out document that shares too many of its long lines with the training part,
copied code say, would be remembered rather than predicted: it is left out of both parts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from perilune.data.document import Corpus, Document, LeftOut
from perilune.errors import RequestError

LONG_LINE_CHARS = 40
"""A line of at least this many characters, indentation aside, is long: unlikely to be equal by chance."""


@dataclass(frozen=True, slots=True)
class Split:
    """The two parts of a corpus, each sorted by name, and what is in neither."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    left_out: tuple[LeftOut, ...]


def split(corpus: Corpus, *, holdout: float, max_overlap: float = 0.4) -> Split:
    """Hold out a part of the corpus.

    A corpus with a single group is split by document instead; one with a single document, by position: its last
    `holdout` share, from the start of a line, is held out.

    Args:
        corpus: the documents.
        holdout: the expected share of the groups, in (0, 1). At least one group is held out and one is kept.
        max_overlap: largest share of a held-out document's long lines that may also stand in the training part.

    Raises:
        RequestError: nothing is left to train on or to hold out.
    """
    assert 0.0 < holdout < 1.0, "holdout is checked by DataConfig"
    documents = corpus.documents
    if len({document.group for document in documents}) == 1:
        documents = tuple(replace(document, group=document.name) for document in documents)
    if len(documents) == 1:
        train, held_out = _cut(documents[0], holdout)
    else:
        chosen = _chosen({document.group for document in documents}, holdout)
        train = tuple(document for document in documents if document.group not in chosen)
        held_out = tuple(document for document in documents if document.group in chosen)
    seen = {line for document in train for line in _long_lines(document.text)}
    kept, left_out = [], list(corpus.left_out)
    for document in held_out:
        lines = _long_lines(document.text)
        shared = sum(line in seen for line in lines) / max(1, len(lines))
        if shared > max_overlap:
            reason = f"held out, but {shared:.0%} of its long lines are in the training part"
            left_out.append(LeftOut(document.name, reason, document.num_bytes))
        else:
            kept.append(document)
    if not train or not kept:
        raise RequestError(
            f"the corpus of {len(corpus.documents)} documents ({corpus.num_bytes} bytes) leaves "
            f"{'nothing to train on' if not train else 'nothing to hold out'} at holdout={holdout}"
            + (f": {left_out[-1].name} is {left_out[-1].reason}" if left_out else "")
            + "; add text"
        )
    return Split(train, tuple(kept), tuple(left_out))


def _chosen(groups: set[str], holdout: float) -> set[str]:
    rank = {group: int.from_bytes(hashlib.sha256(group.encode()).digest()[:8]) / 2**64 for group in groups}
    ordered = sorted(groups, key=lambda group: (rank[group], group))
    below = sum(value < holdout for value in rank.values())
    return set(ordered[: min(max(below, 1), len(ordered) - 1)])


def _cut(document: Document, holdout: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    target = int(len(document.text) * (1.0 - holdout))
    position = document.text.find("\n", target) + 1
    if not 0 < position < len(document.text):  # no line starts after the target: cut inside the line
        position = target
    first, last = document.text[:position], document.text[position:]
    if not first.strip() or not last.strip():
        return (document,), ()
    name = document.name
    return (Document.of(f"{name}#head", name, first),), (Document.of(f"{name}#tail", name, last),)


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE_CHARS]
