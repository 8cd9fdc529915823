"""Byte-level BPE in the standard `tokenizer.json` form, trained here or read from a file.

Text is first cut into pieces by a K3-like rule (architecture §10.1); merges never cross a cut. The one difference is
that digits stand alone instead of in groups of up to three, which a vocabulary of a few thousand cannot afford.
All 256 bytes are in the alphabet, so no text is unknown.

The encoder is built *without* the file's control tokens. `<|open|>` written in a text therefore cannot become the
control id, with no escaping and no flag that somebody could forget.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from perilune.errors import ConfigError, RequestError
from perilune.rundir import write_atomic
from perilune.tokenizer.interface import Tokenizer, encodable
from perilune.tokenizer.special import RESERVED_BLOCK, SpecialTokens

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def presplit(*, digits: int) -> str:
    """The regular expression that cuts text before BPE, K3's eight alternatives in order (architecture §10.1).

    `digits` is how many digits stay together: 3 in the published vocabulary.
    """
    return "|".join(
        [
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
            r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


PRESPLIT = presplit(digits=1)
"""The cuts before BPE: runs of Han, words, single digits, punctuation, newlines, spaces."""

LARGEST_TRAINED = 1 << 22
"""Ids of the largest vocabulary that `train_bpe` makes; the trainer reserves about 45 bytes for each at once."""

_BLOCK_CHARS = 1 << 16
_SHOWN_IN_TEXT = ("<|open|>", "<|close|>", "<|sep|>")  # K3 marks these three "special": false


class BPETokenizer(Tokenizer):
    """A byte-level BPE `tokenizer.json`.

    A file from elsewhere is accepted if it is byte-level BPE without a normalizer and names the control tokens that
    the models need (ConfigError otherwise): only then is decoding the exact inverse of encoding.
    """

    def __init__(self, definition: str) -> None:
        """From the text of a tokenizer.json."""
        try:
            full = json.loads(definition)
            added = [(token["content"], int(token["id"])) for token in full.get("added_tokens", [])]
            kind, normalizer = full["model"].get("type", "BPE"), full.get("normalizer")
            ordinary = full["model"]["vocab"]
            levels = json.dumps([full.get("pre_tokenizer"), full.get("decoder")])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a tokenizer.json ({type(error).__name__}: {error})") from None
        if kind != "BPE" or normalizer is not None or levels.count('"ByteLevel"') < 2:
            raise ConfigError(
                f"tokenizer.json has model {kind!r}, normalizer {normalizer and normalizer.get('type')!r}; only "
                "byte-level BPE without a normalizer keeps every byte: train one with perilune.tokenizer.train_bpe"
            )
        self.special = SpecialTokens.of(added)
        byte_of = _byte_alphabet()
        self._bytes = {
            token_id: bytes(byte_of[char] for char in token)
            for token, token_id in ordinary.items()
            if token not in self.special.ids
        }
        missing = set(range(256)) - {data[0] for data in self._bytes.values() if len(data) == 1}
        if missing:
            raise ConfigError(
                f"tokenizer.json lacks single-byte tokens for {len(missing)} of 256 bytes, e.g. {min(missing)}"
            )
        self._byte_id = {data[0]: token_id for token_id, data in self._bytes.items() if len(data) == 1}
        known = set(self._bytes) | set(self.special.ids.values())
        self.vocab_size = 1 + max(known)
        if len(known) != self.vocab_size:
            gap = min(set(range(self.vocab_size)) - known)
            raise ConfigError(
                f"tokenizer.json has no token for id {gap}; ids must be 0 to {self.vocab_size - 1} without gaps"
            )
        self.fingerprint = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()
        self._definition = definition
        full["added_tokens"], full["post_processor"] = [], None
        full["model"]["vocab"] = {token: i for token, i in ordinary.items() if token not in self.special.ids}
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(full))
        self._cuts_at_newlines = PRESPLIT in json.dumps(full["pre_tokenizer"]).replace("\\\\", "\\")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; texts, and the blocks of a long text, are spread over the CPU's cores."""
        blocks: list[str] = []
        counts: list[int] = []
        for text in texts:
            encodable(text)
            cut = list(_blocks(text)) if self._cuts_at_newlines else [text]
            blocks += cut
            counts.append(len(cut))
        encoded = iter(self._encoder.encode_batch_fast(blocks, add_special_tokens=False))
        return [[token_id for _ in range(count) for token_id in next(encoded).ids] for count in counts]

    def byte_id(self, byte: int) -> int:
        """Id of a one-byte token."""
        return self._byte_id[byte]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an ordinary id; empty for a control id."""
        data = self._bytes.get(token_id)
        if data is None:
            if token_id in self.special:
                return b""
            raise RequestError(f"token id {token_id} is not in this vocabulary of {self.vocab_size}")
        return data

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        write_atomic(path, self._definition.encode())


def train_bpe(texts: Iterable[str], vocab_size: int, *, sample_bytes: int | None = None) -> BPETokenizer:
    """Train a byte-level BPE.

    Args:
        texts: training text. The result depends on the texts and their order only through counts, not on threads.
        vocab_size: ids in all, the reserved block at the end included. Where the text has too few merges, the ids
            between are reserved too, so the result has exactly this many and a model's every output can be decoded.
            ConfigError below 288 (256 bytes and the reserved block), and above 4,194,304: memory is reserved for all.
        sample_bytes: stop reading after about this many bytes, taking every k-th text so that all parts are seen.
    """
    smallest = 256 + RESERVED_BLOCK
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size={vocab_size} is below {smallest} (256 bytes and {RESERVED_BLOCK} control tokens)"
        )
    if vocab_size > LARGEST_TRAINED:
        raise ConfigError(f"vocab_size={vocab_size} is more than a BPE is trained to here; at most {LARGEST_TRAINED}")
    texts = list(texts)
    if sample_bytes is not None:
        stride = max(1, round(sum(map(len, texts)) / sample_bytes))
        texts = [block for text in texts for block in _blocks(text, 1 << 13)][::stride]
    encoder = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(PRESPLIT), behavior="isolated")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - RESERVED_BLOCK,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(texts, trainer)
    special = SpecialTokens.block(vocab_size, unused=vocab_size - RESERVED_BLOCK - encoder.get_vocab_size())
    encoder.add_special_tokens(
        [tokenizers.AddedToken(name, special=name not in _SHOWN_IN_TEXT) for name in special.ids]
    )
    return BPETokenizer(encoder.to_str(pretty=True))


def _blocks(text: str, size: int = _BLOCK_CHARS) -> Iterable[str]:
    """Cut a long text after a newline that a non-space follows: PRESPLIT always cuts there, so ids do not change."""
    start = 0
    while len(text) - start > size:
        end = start + size
        while True:
            end = text.find("\n", end) + 1
            if end == 0 or end >= len(text):
                end = len(text)
                break
            if not text[end].isspace():
                break
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the printable alphabet that byte-level tokenizers are stored in.

    Bytes that print as themselves keep their Latin-1 character; the other 68 take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
