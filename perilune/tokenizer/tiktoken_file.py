"""The published K3 tokenizer: a rank file `tiktoken.model` that the user has, read through the `tiktoken` library.

Each line of the file is a token in base64 and its rank, which is also its id. The 256 control tokens are not in the
file: they take the ids behind the ranks, at fixed offsets (architecture §10.1; K3 has 163,584 ranks, so `[BOS]` is
163584 and `[PAD]` 163839). Names in a `tokenizer_config.json` beside the file are not read: K2's mean other things.

As in `bpe.py` the encoder is built without the control tokens, so text cannot produce one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from perilune.errors import ConfigError, RequestError
from perilune.rundir import write_atomic
from perilune.tokenizer.bpe import presplit
from perilune.tokenizer.interface import Tokenizer, encodable
from perilune.tokenizer.special import PUBLISHED_BLOCK, SpecialTokens

PRESPLIT = presplit(digits=3)
"""The published cuts before BPE; the order of the alternatives matters."""

BLOCK_CHARS = 400_000
RUN_CHARS = 25_000
"""The release encodes at most 400,000 characters at once, and cuts a run of more than 25,000 characters without (or of
nothing but) whitespace: the library's regular expressions overflow their stack on longer ones. The cuts change ids, so
they are part of the format."""

_RUNS = re.compile(r"\s+|\S+")
_FEW_CHARS = 1 << 16


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by a rank file, with 256 control tokens behind the ranks."""

    def __init__(self, definition: bytes, source: str = "the rank file") -> None:
        """From the content of a rank file; `source` names it in errors.

        Raises:
            ConfigError: the file is damaged (the line is named), or the `tiktoken` library is not installed.
        """
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(f"reading {source} needs tiktoken: pip install 'perilune[hf]'") from None
        self._tokens = _read_ranks(definition, source)
        ranks = {token: rank for rank, token in enumerate(self._tokens)}
        self._byte_id = [ranks[bytes([byte])] for byte in range(256)]
        self.vocab_size = len(ranks) + PUBLISHED_BLOCK
        self.special = SpecialTokens.block(self.vocab_size, size=PUBLISHED_BLOCK)
        listing = "\n".join([PRESPLIT, *self.special.ids, *(token.hex() for token in self._tokens)])
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()
        self._encoder = tiktoken.Encoding(
            "perilune", pat_str=PRESPLIT, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; much text is spread over the CPU's cores."""
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            encodable(text)
            cut = list(_pieces(text))
            pieces += cut
            counts.append(len(cut))
        if sum(map(len, pieces)) <= _FEW_CHARS:
            encoded = iter([self._encoder.encode_ordinary(piece) for piece in pieces])
        else:
            encoded = iter(self._encoder.encode_ordinary_batch(pieces, num_threads=os.cpu_count() or 1))
        return [[token_id for _ in range(count) for token_id in next(encoded)] for count in counts]

    def byte_id(self, byte: int) -> int:
        """Id of a one-byte token."""
        return self._byte_id[byte]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an ordinary id; empty for a control id."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is not in this vocabulary of {self.vocab_size}")
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def save(self, path: Path) -> None:
        """Write the rank file again (under any name: `load_tokenizer` goes by the content)."""
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._tokens)]
        write_atomic(path, b"".join(lines))


def looks_like_ranks(definition: bytes) -> bool:
    """Whether the first line of a file is a base64 word and a number."""
    return re.match(rb"[A-Za-z0-9+/]+=*[ \t]+\d+\s*(\n|\Z)", definition) is not None


def _read_ranks(definition: bytes, source: str) -> list[bytes]:
    """Tokens in rank order; ConfigError that names the line or the rank that is wrong."""
    token_of: dict[int, bytes] = {}
    line_of: dict[bytes, int] = {}
    for number, line in enumerate(definition.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        words = line.split()
        if len(words) != 2 or not words[1].isdigit():
            raise ConfigError(f"{where} is {_shown(line)}; each line must be a token in base64, a space, and its rank")
        try:
            token = base64.b64decode(words[0], validate=True)
        except binascii.Error as error:
            raise ConfigError(f"{where}: {_shown(words[0])} is not base64 ({error}); is the file whole?") from None
        rank = int(words[1])
        if not token:
            raise ConfigError(f"{where} has an empty token; a token is at least one byte")
        if rank in token_of:
            raise ConfigError(f"{where} gives rank {rank} a second time; every rank needs one token")
        if token in line_of:
            raise ConfigError(f"{where} has the token {token!r} of line {line_of[token]} again; tokens must differ")
        token_of[rank], line_of[token] = token, number
    if not token_of:
        raise ConfigError(f"{source} is empty; give the tiktoken.model of a published model")
    absent = next((rank for rank in range(len(token_of)) if rank not in token_of), None)
    if absent is not None:
        raise ConfigError(
            f"{source} has no rank {absent}, though its {len(token_of)} ranks go up to {max(token_of)}; ranks must be "
            "0, 1, 2, … without holes: is the file whole?"
        )
    lacking = [byte for byte in range(256) if bytes([byte]) not in line_of]
    if lacking:
        raise ConfigError(
            f"{source} lacks single-byte tokens for {len(lacking)} of 256 bytes, e.g. {lacking[0]}; without them not "
            "every text can be encoded"
        )
    return [token_of[rank] for rank in range(len(token_of))]


def _shown(data: bytes) -> str:
    return repr(data[:40].decode("latin-1")) + ("…" if len(data) > 40 else "")


def _pieces(text: str) -> Iterator[str]:
    """Cut a text as the release does; see RUN_CHARS. The pieces joined are the text."""
    for begin in range(0, len(text), BLOCK_CHARS):
        block = text[begin : begin + BLOCK_CHARS]
        start = 0
        if len(block) > RUN_CHARS:
            for run in _RUNS.finditer(block):
                for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                    yield block[start:cut]
                    start = cut
        yield block[start:]
