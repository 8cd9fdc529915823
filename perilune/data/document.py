"""A piece of text with a name, and a corpus: an ordered set of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

LONG_LINE_CHARS = 40
"""A line of at least this many characters, indentation aside, is long: unlikely to be equal by chance."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    Attributes:
        name: where it came from, relative to what the user named, `/` between parts; the sort key.
        group: what is held out together: a top-level module, package or file, or one record of a jsonl file.
        text: the text.
        num_bytes: its UTF-8 length.
        sha256: hex digest of its UTF-8 bytes.
    """

    name: str
    group: str
    text: str
    num_bytes: int
    sha256: str

    @staticmethod
    def of(name: str, group: str, text: str) -> Document:
        """Measure and hash `text`. A lone surrogate (possible in JSON only) becomes `?`."""
        data = text.encode("utf-8", errors="replace")
        return Document(name, group, data.decode("utf-8"), len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A document that is in no part of the data, and why."""

    name: str
    reason: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents sorted by name, each text once.

    Attributes:
        documents: sorted by name, then content.
        left_out: what was found and not taken.
    """

    documents: tuple[Document, ...]
    left_out: tuple[LeftOut, ...] = ()

    @staticmethod
    def of(documents: Iterable[Document], left_out: Iterable[LeftOut] = ()) -> Corpus:
        """Sort, drop empty texts, and keep the first of equal texts (exact deduplication, report §3.4)."""
        kept: dict[str, Document] = {}
        dropped = list(left_out)
        for document in sorted(documents, key=lambda document: (document.name, document.sha256)):
            if not document.text.strip():
                dropped.append(LeftOut(document.name, "empty", document.num_bytes))
            elif document.sha256 in kept:
                twin = kept[document.sha256].name
                dropped.append(LeftOut(document.name, f"same text as {twin}", document.num_bytes))
            else:
                kept[document.sha256] = document
        return Corpus(tuple(kept.values()), tuple(dropped))

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(document.num_bytes for document in self.documents)

    @property
    def fingerprint(self) -> str:
        """sha256 hex of all names and contents in order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.group}\0{document.name}\0{document.sha256}\n".encode())
        return digest.hexdigest()


def long_lines(text: str) -> list[str]:
    """The long lines of a text, without indentation and trailing spaces."""
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE_CHARS]
