"""Names of prefixes: one digest for each whole hash unit, chained, so that it stands for all tokens up to there.

The chain starts at a digest of everything besides the tokens that decides what a state holds: the model, its weights and
their version, the formats, the adapter, the tenant's salt. An image is named by its content in the unit in which its
embeddings begin: its pads have equal token ids, and what stands before the image can still be shared.

SHA-256 is what hashlib does fastest where the CPU has instructions for it, and nobody can make two prompts collide.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from perilune.errors import RequestError

TOKEN_BYTES = 4
assert array("I").itemsize == TOKEN_BYTES, "array('I') has 4 bytes on every platform that torch runs on"


@dataclass(frozen=True, kw_only=True, slots=True)
class RootKey:
    """What a cached state depends on besides tokens and images.

    Attributes:
        model: name or path of the model.
        weights: version of its weights; another number for each update of a training run.
        numerics: formats of weights and cache, as text: what was computed with one is no hit for another.
        lora: name and version of the adapter; empty = none.
        salt: of the tenant; requests with different salts never share.
    """

    model: str
    weights: int = 0
    numerics: str = ""
    lora: str = ""
    salt: str = ""

    def digest(self) -> bytes:
        """The start of the chain. Each field goes in with its name, type and length: no two keys have equal bytes."""
        hasher = hashlib.sha256(b"perilune prefix cache 1")
        for field in fields(self):
            value = getattr(self, field.name)
            kind, data = ("i", str(value)) if isinstance(value, int) else ("s", value)
            encoded = data.encode("utf-8", "surrogatepass")
            hasher.update(f"{field.name}:{kind}:{len(encoded)}:".encode() + encoded)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class ImageKey:
    """An image in a prompt.

    Attributes:
        start: index of its first pad among the tokens.
        tokens: how many pads.
        digest: of its content as the model sees it.
    """

    start: int
    tokens: int
    digest: bytes


class TokenChain:
    """The digests of a growing sequence of tokens; hashing costs only what is new.

    Args:
        root: what besides the tokens decides.
        unit: tokens of a hash unit.
        ids: first tokens, see `extend`.
        images: see `extend`.

    Attributes:
        unit: tokens of a hash unit.
        digests: one for each whole unit so far; `digests[i]` names the first `(i + 1) * unit` tokens.
    """

    __slots__ = ("_images", "_last", "_length", "_rest", "digests", "unit")

    def __init__(
        self, root: RootKey, unit: int, ids: Sequence[int] | np.ndarray = (), images: Sequence[ImageKey] = ()
    ) -> None:
        assert unit >= 1, f"a unit of {unit} tokens"
        self.unit = unit
        self.digests: list[bytes] = []
        self._last = root.digest()
        self._rest = b""  # tokens behind the last whole unit
        self._length = 0
        self._images: list[ImageKey] = []  # those whose unit is not whole yet
        self.extend(ids, images)

    def __len__(self) -> int:
        """Tokens so far."""
        return self._length

    def copy(self) -> TokenChain:
        """A chain that can go on differently."""
        twin = object.__new__(TokenChain)
        twin.unit, twin.digests = self.unit, list(self.digests)
        twin._last, twin._rest, twin._length, twin._images = self._last, self._rest, self._length, list(self._images)
        return twin

    def skip(self, digests: Sequence[bytes]) -> None:
        """Stand behind tokens that were hashed before, given all their digests; the root and the unit must be the same."""
        self.digests = list(digests)
        self._last, self._rest, self._length = self.digests[-1], b"", len(self.digests) * self.unit

    def extend(self, ids: Sequence[int] | np.ndarray, images: Sequence[ImageKey] = ()) -> None:
        """Append tokens. An unsigned 32-bit array is read in place; a list is converted first.

        Args:
            ids: token ids, 0 to 2**32 - 1.
            images: those that begin among these tokens.

        Raises:
            RequestError: an id is out of range, or an image begins elsewhere.
        """
        data = _as_bytes(ids)
        end = self._length + len(data) // TOKEN_BYTES
        for image in images:
            if not self._length <= image.start < end:
                raise RequestError(
                    f"an image begins at token {image.start}, but the tokens that came with it are "
                    f"{self._length} to {end - 1}; give an image together with its pads"
                )
        step = self.unit * TOKEN_BYTES
        if self._rest:
            data = self._rest + bytes(data)
        whole = len(data) - len(data) % step
        self._images += sorted(images, key=lambda image: image.start)
        previous, add, sha256 = self._last, self.digests.append, hashlib.sha256
        if self._images:
            for start in range(0, whole, step):
                hasher = sha256(previous)
                hasher.update(data[start : start + step])
                self._add_images(hasher, (len(self.digests) + 1) * self.unit)
                previous = hasher.digest()
                add(previous)
        else:
            for start in range(0, whole, step):
                hasher = sha256(previous)
                hasher.update(data[start : start + step])
                previous = hasher.digest()
                add(previous)
        self._last, self._rest, self._length = previous, bytes(data[whole:]), end

    def _add_images(self, hasher: hashlib._Hash, end: int) -> None:
        # Tokens of a unit have a fixed number of bytes, so what follows them cannot be taken for tokens.
        while self._images and self._images[0].start < end:
            image = self._images.pop(0)
            hasher.update(f"image:{image.start}:{image.tokens}:{len(image.digest)}:".encode() + image.digest)


def _as_bytes(ids: Sequence[int] | np.ndarray) -> memoryview | bytes:
    """Little-endian 32-bit ids."""
    try:
        if isinstance(ids, np.ndarray):
            if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2 ** (8 * TOKEN_BYTES)):
                raise OverflowError("out of range")
            return memoryview(np.ascontiguousarray(ids, dtype="<u4")).cast("B") if ids.size else b""
        numbers = array("I", ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"token ids must be integers from 0 to {2 ** (8 * TOKEN_BYTES) - 1}: {error}") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return memoryview(numbers).cast("B")


def token_array(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids as unsigned 32-bit numbers, little-endian.

    Raises:
        RequestError: an id is out of range.
    """
    return np.frombuffer(_as_bytes(ids), "<u4")
