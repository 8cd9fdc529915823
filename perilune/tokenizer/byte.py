"""One id a byte: no training, no file, 256 ordinary ids and the reserved block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from perilune.errors import RequestError
from perilune.rundir import write_atomic
from perilune.tokenizer.interface import Tokenizer, encodable
from perilune.tokenizer.special import RESERVED_BLOCK, SpecialTokens


class ByteTokenizer(Tokenizer):
    """Id = byte value; control ids from 256 on. Vocabulary 288."""

    def __init__(self) -> None:
        self.vocab_size = 256 + RESERVED_BLOCK
        self.special = SpecialTokens.block(self.vocab_size)
        self.fingerprint = hashlib.sha256(f"byte {RESERVED_BLOCK}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text (its UTF-8 bytes)."""
        return [list(encodable(text)) for text in texts]

    def byte_id(self, byte: int) -> int:
        """The byte itself."""
        return byte

    def token_bytes(self, token_id: int) -> bytes:
        """The one byte of an ordinary id; empty for a control id."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the byte vocabulary 0..{self.vocab_size - 1}")
        return bytes([token_id]) if token_id < 256 else b""

    def save(self, path: Path) -> None:
        """Write a small JSON marker file."""
        write_atomic(path, json.dumps({"type": "perilune-byte"}).encode())
