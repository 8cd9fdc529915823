"""Training part and held-out part, with nothing of the one in the other.

Whole groups (top-level modules, packages, files, records) are held out, chosen by a hash of their name, so a group stays
on its side when the corpus grows. A held-out document that shares too many of its long lines with the training part,
copied code say, would be remembered rather than predicted: it is left out of both parts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace

from perilune.data.document import Corpus, Document, LeftOut, long_lines
from perilune.errors import RequestError


@dataclass(frozen=True, slots=True)
class Split:
    """The two parts of a corpus, each sorted by name, and what is in neither."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    left_out: tuple[LeftOut, ...]


MAX_GROUP_SHARE = 0.25
"""A group with more of the text than this is divided, so that no single one can tip the balance."""


def split(corpus: Corpus, *, holdout: float, max_overlap: float = 0.4) -> Split:
    """Hold out a part of the corpus.

    The groups whose hash falls below `holdout` are held out, and more of them, in the order of the hash, until the
    held-out text is at least a quarter of the share asked for (few or small groups can miss it), or half of the text
    is spent on that.

    A group with more than a quarter of all text is divided by the next part of its documents' names: a large package
    by its sub-packages. A corpus with a single group is split by document; one with a single document by position: its
    last `holdout` share, from the start of a line, is held out.

    Args:
        corpus: the documents.
        holdout: the share to hold out, in (0, 1). At least one group is held out and one is kept.
        max_overlap: largest share of a held-out document's long lines that may also stand in the training part.

    Raises:
        RequestError: nothing is left to train on or to hold out.
    """
    assert 0.0 < holdout < 1.0, "holdout is checked by DataConfig"
    documents = _divided(corpus.documents, limit_bytes=MAX_GROUP_SHARE * corpus.num_bytes)
    if len({document.group for document in documents}) == 1:
        documents = tuple(replace(document, group=document.name) for document in documents)
    if len(documents) == 1:
        documents = _cut(documents[0], holdout)
        ordered, count = [document.group for document in reversed(documents)], 1
    else:
        ordered, count = _by_hash({document.group for document in documents}, holdout)
    parts = None
    for number in range(count, max(count + 1, len(ordered))):
        parts = _separate(documents, set(ordered[:number]), max_overlap)
        held_out_bytes = sum(document.num_bytes for document in parts.held_out)
        train_bytes = sum(document.num_bytes for document in parts.train)
        if held_out_bytes >= holdout / 4 * corpus.num_bytes or (parts.held_out and train_bytes < corpus.num_bytes / 2):
            break
    if parts is None or not parts.train or not parts.held_out:
        reason = f": {parts.left_out[-1].name} was {parts.left_out[-1].reason}" if parts and parts.left_out else ""
        raise RequestError(
            f"the corpus of {len(corpus.documents)} documents ({corpus.num_bytes} bytes) cannot be divided into a "
            f"training part and a held-out part at holdout={holdout}{reason}; add text"
        )
    return replace(parts, left_out=(*corpus.left_out, *parts.left_out))


def _separate(documents: tuple[Document, ...], held_out: set[str], max_overlap: float) -> Split:
    train = tuple(document for document in documents if document.group not in held_out)
    seen = {line for document in train for line in long_lines(document.text)}
    kept, left_out = [], []
    for document in documents:
        if document.group not in held_out:
            continue
        lines = long_lines(document.text)
        shared = sum(line in seen for line in lines) / max(1, len(lines))
        if shared > max_overlap:
            reason = f"held out, but {shared:.0%} of its long lines are in the training part"
            left_out.append(LeftOut(document.name, reason, document.num_bytes))
        else:
            kept.append(document)
    return Split(train, tuple(kept), tuple(left_out))


def _divided(documents: tuple[Document, ...], limit_bytes: float) -> tuple[Document, ...]:
    """Groups of more than `limit_bytes` divided, as often as their documents' names allow."""
    while True:
        sizes: Counter[str] = Counter()
        for document in documents:
            sizes[document.group] += document.num_bytes
        divided = tuple(
            replace(document, group=_subgroup(document)) if sizes[document.group] > limit_bytes else document
            for document in documents
        )
        if divided == documents:
            return documents
        documents = divided


def _subgroup(document: Document) -> str:
    prefix = document.group + "/"
    if not document.name.startswith(prefix):
        return document.group
    return prefix + document.name[len(prefix) :].partition("/")[0]


def _by_hash(groups: set[str], holdout: float) -> tuple[list[str], int]:
    """Groups in the order in which they are held out, and how many are, at the least, by their hash."""
    rank = {group: int.from_bytes(hashlib.sha256(group.encode()).digest()[:8]) / 2**64 for group in groups}
    ordered = sorted(groups, key=lambda group: (rank[group], group))
    below = sum(value < holdout for value in rank.values())
    return ordered, min(max(below, 1), len(ordered) - 1)


def _cut(document: Document, holdout: float) -> tuple[Document, ...]:
    """Head and tail of a text, as documents and groups of their own; fewer if one is empty."""
    target = int(len(document.text) * (1.0 - holdout))
    position = document.text.find("\n", target) + 1
    if not 0 < position < len(document.text):  # no line starts after the target: cut inside the line
        position = target
    parts = (("head", document.text[:position]), ("tail", document.text[position:]))
    names = [(f"{document.name}#{part}", text) for part, text in parts if text.strip()]
    return tuple(Document.of(name, name, text) for name, text in names)
