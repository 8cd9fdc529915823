"""The control tokens that no text can produce.

K3 reserves one block of ids above its BPE ranks for them (`spec: architecture §10.1`: `[BOS]` is the first id of the
block, `[UNK]` and `[PAD]` are the last two, everything unnamed reads `<|reserved_token_{id}|>`). Tokenizers trained
here keep the same names at the same offsets in a shorter block at the end of the vocabulary, so chat can be taught to
a base model without changing its embedding table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perilune.errors import ConfigError

RESERVED_BLOCK = 32
"""Ids reserved at the end of a vocabulary trained here."""

PUBLISHED_BLOCK = 256
"""Ids that K3 reserves behind its BPE ranks."""

_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,  # only where the block is that long
}
_AT_THE_END = ("[UNK]", "[PAD]")
_REQUIRED = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[UNK]", "[PAD]")


@dataclass(frozen=True)
class SpecialTokens:
    """Names and ids of a tokenizer's control tokens.

    Attributes:
        ids: name -> id of every control token, in id order, unnamed reserved ones included.
    """

    ids: Mapping[str, int]

    def __post_init__(self) -> None:
        missing = [name for name in _REQUIRED if name not in self.ids]
        if missing:
            raise ConfigError(
                f"this tokenizer has no control token {', '.join(missing)}; perilune models need all of "
                f"{', '.join(_REQUIRED)}: train a tokenizer with `perilune.tokenizer.train_bpe`, or add them as "
                "added_tokens of tokenizer.json"
            )

    @staticmethod
    def block(vocab_size: int, unused: int = 0, size: int = RESERVED_BLOCK) -> SpecialTokens:
        """The reserved block of `size` ids at the end of a vocabulary, and `unused` more reserved ids before it."""
        first = vocab_size - size
        last = {vocab_size - len(_AT_THE_END) + i: name for i, name in enumerate(_AT_THE_END)}
        name_at = {first + offset: name for name, offset in _OFFSETS.items() if offset < size} | last
        ids = range(first - unused, vocab_size)
        return SpecialTokens({name_at.get(i, f"<|reserved_token_{i}|>"): i for i in ids})

    @staticmethod
    def of(pairs: Iterable[tuple[str, int]]) -> SpecialTokens:
        """From (name, id) pairs in any order; ConfigError if a token that the models need is absent."""
        return SpecialTokens(dict(sorted(pairs, key=lambda pair: pair[1])))

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._name_of

    def name(self, token_id: int) -> str:
        """Name of a control token's id."""
        return self._name_of[token_id]

    @property
    def _name_of(self) -> dict[int, str]:
        cached = self.__dict__.get("_names")
        if cached is None:
            cached = {token_id: name for name, token_id in self.ids.items()}
            object.__setattr__(self, "_names", cached)
        return cached

    @property
    def bos(self) -> int:
        """Begin of sequence; the chat renderer never emits it (architecture §10.1)."""
        return self.ids["[BOS]"]

    @property
    def eos(self) -> int:
        """End of a document in pre-training."""
        return self.ids["[EOS]"]

    @property
    def end_of_msg(self) -> int:
        """End of a chat message: the stop token of a chat turn."""
        return self.ids["<|end_of_msg|>"]

    @property
    def open(self) -> int:
        """Begins an opening tag."""
        return self.ids["<|open|>"]

    @property
    def close(self) -> int:
        """Begins a closing tag."""
        return self.ids["<|close|>"]

    @property
    def sep(self) -> int:
        """Ends a tag."""
        return self.ids["<|sep|>"]

    @property
    def pad(self) -> int:
        """Filler that is never predicted."""
        return self.ids["[PAD]"]
