"""Tokens on disk: flat files of uint16 or uint32 that are memory-mapped, an array of document starts, a JSON index.

Every document is its tokens followed by `[EOS]`. Readers see one long stream, however many files it lies in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.errors import RequestError
from perilune.rundir import write_atomic

FORMAT = 1
SHARD_TOKENS = 1 << 27


class TokenStream(Protocol):
    """Documents end to end.

    Attributes:
        offsets: int64 `[documents + 1]`, stream position of each document's first token, then `num_tokens`.
        fingerprint: hex digest of the content.
    """

    offsets: NDArray[np.int64]
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """A copy of the tokens at positions start to stop - 1; cut at the stream's end."""
        ...


class TokenStore:
    """A store on disk, opened for reading.

    Attributes:
        offsets, fingerprint: see `TokenStream`.
        text_bytes: int64 `[documents]`, UTF-8 bytes of each document.
    """

    def __init__(self, path: Path) -> None:
        """Open the store in the directory `path`; RequestError if there is none or a file is short."""
        self.path = path
        try:
            index = json.loads((path / "index.json").read_text())
            documents = np.fromfile(path / "documents.bin", dtype="<i8").reshape(-1, 2)
            self._shards = [np.memmap(path / name, dtype=index["dtype"], mode="r") for name in index["shards"]]
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(f"{path} is not a token store: {error}; delete it, it will be built again") from None
        self._bounds = np.cumsum([0] + [len(shard) for shard in self._shards])
        if index.get("format") != FORMAT or self._bounds[-1] != index["tokens"] or len(documents) != index["documents"]:
            raise RequestError(
                f"{path} holds {self._bounds[-1]} tokens in {len(documents)} documents, its index says {index['tokens']} "
                f"in {index['documents']} (format {index.get('format')}, expected {FORMAT}); delete it, it will be built again"
            )
        self.offsets: NDArray[np.int64] = np.append(documents[:, 0], index["tokens"]).astype(np.int64)
        self.text_bytes: NDArray[np.int64] = documents[:, 1].astype(np.int64)
        self.fingerprint: str = index["fingerprint"]

    @property
    def num_tokens(self) -> int:
        """Length of the stream, `[EOS]` of every document included."""
        return int(self._bounds[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """A copy of the tokens at positions start to stop - 1; cut at the stream's end."""
        parts = [
            shard[max(0, start - begin) : max(0, stop - begin)] for shard, begin in zip(self._shards, self._bounds)
        ]
        return np.concatenate(parts).astype(np.int64)


def write_store(
    path: Path,
    documents: Iterable[tuple[Sequence[int], int]],
    *,
    eos: int,
    vocab_size: int,
    fingerprint: str,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenStore:
    """Write a store to the new directory `path` and open it. The index comes last: without it there is no store.

    Args:
        path: must not exist.
        documents: (ids without `[EOS]`, UTF-8 bytes of the text) in order; consumed one by one.
        eos: id put after each document.
        vocab_size: ids are below this; it decides between 2 and 4 bytes a token.
        fingerprint: digest of what the tokens come from.
        shard_tokens: tokens after which a new file is begun, at the next document.

    Raises:
        RequestError: there is no document.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    path.mkdir(parents=True)
    table: list[tuple[int, int]] = []
    shards: list[str] = []
    total = 0
    numbered = iter(documents)
    item = next(numbered, None)
    while item is not None:
        shards.append(f"tokens-{len(shards):05d}.bin")
        shard_end = total + shard_tokens
        with open(path / shards[-1], "wb") as file:
            while item is not None and total < shard_end:
                tokens = np.fromiter([*item[0], eos], dtype=np.int64)
                assert 0 <= tokens.min() and tokens.max() < vocab_size, (
                    f"an id is outside the vocabulary of {vocab_size}"
                )
                file.write(tokens.astype(dtype).tobytes())
                table.append((total, item[1]))
                total += len(tokens)
                item = next(numbered, None)
            file.flush()
            os.fsync(file.fileno())
    if not table:
        raise RequestError("there is no document to write to a token store")
    write_atomic(path / "documents.bin", np.asarray(table, dtype="<i8").tobytes())
    index = {"format": FORMAT, "dtype": dtype.str, "tokens": total, "documents": len(table), "shards": shards}
    write_atomic(path / "index.json", json.dumps(index | {"fingerprint": fingerprint}).encode())
    return TokenStore(path)


class RepeatedDocuments:
    """A stream in which documents of another stream stand several times: up-sampling without a copy on disk.

    First comes every document once, then those repeated at least twice once more, and so on; the copies of one
    document are therefore far apart.
    """

    def __init__(self, stream: TokenStream, repeats: NDArray[np.int64]) -> None:
        """`repeats`: int64 `[documents]`, how often each one stands in the new stream (0 = left out)."""
        assert len(repeats) == len(stream.offsets) - 1, "one number a document"
        self._stream = stream
        rounds = [np.flatnonzero(repeats > r) for r in range(int(repeats.max(initial=0)))]
        if not rounds:
            raise RequestError("every document is repeated 0 times; nothing is left")
        self._order = np.concatenate(rounds)
        lengths = np.diff(stream.offsets)[self._order]
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.fingerprint = f"{stream.fingerprint}*{','.join(map(str, np.bincount(repeats)))}"

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """A copy of the tokens at positions start to stop - 1; cut at the stream's end."""
        stop = min(stop, self.num_tokens)
        parts = [np.empty(0, dtype=np.int64)]
        position = start
        document = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while position < stop:
            end = min(stop, int(self.offsets[document + 1]))
            shift = int(self._stream.offsets[self._order[document]] - self.offsets[document])
            parts.append(self._stream.read(position + shift, end + shift))
            position, document = end, document + 1
        return np.concatenate(parts)
