"""One safetensors file, read and written in pieces.

    8 bytes   length of the header, little endian
    header    JSON: name → {dtype, shape, data_offsets}, and __metadata__
    data      the tensors back to back

Reading goes through plain `read` calls at computed offsets instead of a memory map, so what a conversion holds is the piece
it works on and nothing else. Every length is checked before it is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from perilune.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
PIECE = 1 << 21
"""Elements that are read, cast and written at once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: where, what, from which byte on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.count * DTYPES[self.dtype].itemsize


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return table


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: the file is missing, cut, longer than its tensors, or its header does not describe it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} is no whole safetensors file: its header should have {length:,} bytes, the file has {size:,}; "
                    "fetch the file again"
                )
            header = json.loads(file.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is not valid JSON ({error})") from None
    entries, spans = {}, []
    for name, told in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
            entry = Entry(path, dtype, shape, 8 + length + begin)
            if dtype not in DTYPES:
                raise CheckpointError(f"{path}: {name} has the dtype {dtype!r}; known: {', '.join(DTYPES)}")
            if any(n < 0 for n in shape) or end - begin != entry.nbytes:
                raise CheckpointError(
                    f"{path}: {name} {list(shape)} {dtype} needs {entry.nbytes:,} bytes, its header gives it {end - begin:,}"
                )
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: the header's entry for {name} is damaged ({error!r})") from None
        entries[name] = entry
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise CheckpointError(
                f"{path}: {name} begins at byte {begin:,} of the data instead of {at:,}; the header is damaged"
            )
        at = end
    if size != 8 + length + at:
        raise CheckpointError(
            f"{path} has {size:,} bytes, its tensors need {8 + length + at:,}: the file was "
            f"{'cut' if size < 8 + length + at else 'written over'}; fetch it again"
        )
    return entries


class FileReader:
    """Reads ranges of tensors; keeps the last file open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: IO[bytes] | None = None

    def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `[start, stop)` of a flattened tensor, in its stored dtype.

        Raises:
            CheckpointError: the file became shorter or unreadable since its header was read.
        """
        stop = entry.count if stop is None else stop
        dtype = DTYPES[entry.dtype]
        out = torch.empty(stop - start, dtype=dtype)
        view = memoryview(out.view(torch.uint8).numpy())
        try:
            if entry.file != self._path or self._file is None:
                self.close()
                self._file, self._path = entry.file.open("rb", buffering=0), entry.file
            self._file.seek(entry.begin + start * dtype.itemsize)
            done = 0
            while done < len(view):
                got = self._file.readinto(view[done:])  # pyright: ignore[reportAttributeAccessIssue]
                if not got:
                    raise CheckpointError(
                        f"{entry.file} ends before its tensors do: the file was cut while it was read"
                    )
                done += got
        except OSError as error:
            raise CheckpointError(f"cannot read {entry.file}: {error.strerror}") from error
        return out

    def pieces(self, entry: Entry, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """The same range in pieces of at most `PIECE` elements."""
        stop = entry.count if stop is None else stop
        for at in range(start, stop, PIECE):
            yield self.read(entry, at, min(at + PIECE, stop))

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
        self._file = self._path = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: its header entry, and a function that yields its elements in order, in pieces.

    A piece has the tensor's dtype, or another one that is cast to it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def aligned(tensors: Iterable[Planned]) -> list[Planned]:
    """Wider dtypes first, otherwise in order: every tensor then begins at a multiple of its element size."""
    return sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)


def write_shard(
    path: Path, tensors: Sequence[Planned], on_bytes: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Write one synced safetensors file piece by piece and hash it on the way.

    Args:
        path: the file; it is not complete before this function returns.
        tensors: in the order of the file.
        on_bytes: called with the number of bytes of each piece after it was written.

    Returns:
        `{"bytes", "sha256"}` of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    # Hashing lets go of the interpreter lock, so it runs beside the write.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:

        def put(piece: bytes | memoryview) -> None:
            hashed = hasher.submit(digest.update, piece)
            view, done = memoryview(piece), 0
            while done < len(view):
                done += file.write(view[done:])
            hashed.result()

        put(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            dtype, count = DTYPES[tensor.dtype], 0
            for piece in tensor.pieces():
                flat = piece.to(dtype).contiguous().reshape(-1)
                put(memoryview(flat.view(torch.uint8).numpy()))
                count += flat.numel()
                if on_bytes is not None:
                    on_bytes(flat.nbytes)
            assert count == math.prod(tensor.shape), f"{tensor.name}: {count} elements for the shape {tensor.shape}"
            written += tensor.nbytes
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + written, "sha256": digest.hexdigest()}
