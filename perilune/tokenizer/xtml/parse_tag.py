"""The inside of a tag: what stands between `<|open|>` or `<|close|>` and `<|sep|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from perilune.tokenizer.xtml.markup import escape, unescape

LONGEST_TAG = 4096
"""Bytes after which a marker without `<|sep|>` was no tag: tool names and argument keys are far shorter."""

_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,63}"
_KEY = r"[A-Za-z_]\w{0,63}"
_BEGINNING = re.compile(rf'\s{{0,64}}(?:{_NAME}(?:\s+{_KEY}="[^"]*")*(?:\s+(?:{_KEY}(?:=(?:"[^"]*)?)?)?)?)?')
_ATTRIBUTE = re.compile(rf'({_KEY})="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag as read.

    Attributes:
        name: of the element.
        attributes: unescaped values; of a repeated key the last.
        text: as written.
    """

    name: str
    attributes: Mapping[str, str]
    text: str

    @property
    def canonical(self) -> bool:
        """Whether the renderer would have written it so: no stray spaces, nothing unfinished, known escapes only."""
        return self.text == self.name + "".join(f' {key}="{escape(value)}"' for key, value in self.attributes.items())


def may_be_tag(text: str) -> bool:
    """Whether `text` begins some tag: spaces, a name, attributes. What is no beginning stays none when text is added."""
    return _BEGINNING.fullmatch(text) is not None


def read_tag(text: str) -> Tag:
    """Read the whole inside of a tag, for which `may_be_tag` holds; spaces around it are tolerated."""
    name = re.match(rf"\s*({_NAME})?", text)
    assert name is not None, text
    return Tag(
        name[1] or "",
        {found[1]: unescape(found[2]) for found in _ATTRIBUTE.finditer(text[name.end() :])},
        text,
    )
