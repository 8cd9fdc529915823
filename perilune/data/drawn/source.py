"""Windows of drawn pictures for the loader: whole documents end to end, and text where no further one fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from perilune.data.drawn.catalogue import Catalogue
from perilune.data.drawn.documents import DocumentWriter
from perilune.data.loader import Batch
from perilune.data.order import hash_integers
from perilune.data.packing import PlacedImage, Window, window
from perilune.data.shards import TokenStream
from perilune.errors import ConfigError

_UNLIMITED = 1 << 30
_TRIES = 64


class DrawnSource:
    """Image documents packed like text: no document is cut, so no picture lies in two windows.

    What is left at the end of a window, always less than one document, is filled with a piece of the text, so that no
    position is wasted on padding.

    Attributes:
        fingerprint: everything that decides the windows.
    """

    def __init__(self, catalogue: Catalogue, writer: DocumentWriter, filler: TokenStream) -> None:
        """Set up.

        Args:
            catalogue: the pictures; only its training part is used.
            writer: makes documents of them.
            filler: text for the ends of windows.
        """
        self._catalogue, self._writer, self._filler = catalogue, writer, filler
        self.fingerprint = " ".join([
            catalogue.fingerprint, f"chat {writer.chat:g}", repr(writer.processor.cfg), writer.tokenizer.fingerprint,
            filler.fingerprint,
        ])  # fmt: skip

    def window(self, index: int, seq_len: int, key: Sequence[int]) -> Window:
        """Window `index`: pictures from a number that (key, index) decides, up to the first that does not fit.

        Pictures before the first that fits are passed over, so in short windows kinds with long captions are rare.

        Raises:
            ConfigError: none of 64 pictures fits with its caption into `seq_len` tokens.
        """
        number = hash_integers([*key, index]) >> 1  # numpy's generators take numbers without a sign
        ids, targets, starts = [], [], np.zeros(seq_len, dtype=np.bool_)
        images: list[PlacedImage] = []
        used = 0
        for picture in itertools.count(number):
            document = self._writer.document(self._catalogue.draw(picture), seq_len - used)
            if document is None and images:
                break
            if document is not None:
                ids.append(document.ids)
                targets.append(document.targets)
                images.append(PlacedImage(used + document.image.position, document.image.image))
                starts[used] = True
                used += len(document.ids)
            elif picture - number == _TRIES:
                raise ConfigError(
                    f"a picture with its caption does not fit into a window of {seq_len} tokens; lengthen stages.seq_len, "
                    "or make the pictures smaller (data.vision.image_size)"
                )
        if used < seq_len:
            rest = self._rest(seq_len - used, [*key, index])
            ids.append(rest.ids)
            targets.append(rest.targets)
            starts[used:] = rest.starts
            starts[used] = True
        return Window(np.concatenate(ids), np.concatenate(targets), starts, tuple(images))

    def held_out(self, count: int) -> Batch:
        """One row of `count` documents of pictures that are in no window."""
        drawings = [self._catalogue.draw(index, "held_out") for index in range(count)]
        documents = [document for each in drawings if (document := self._writer.document(each, _UNLIMITED)) is not None]
        starts = np.cumsum([0, *(len(document.ids) for document in documents)])
        mask = np.zeros(starts[-1], dtype=np.bool_)
        mask[starts[:-1]] = True
        images = tuple(
            PlacedImage(int(first) + document.image.position, document.image.image)
            for first, document in zip(starts[:-1], documents, strict=True)
        )
        rows = (np.concatenate([d.ids for d in documents]), np.concatenate([d.targets for d in documents]), mask)
        return Batch(*(torch.from_numpy(row[None]) for row in rows), (images,))

    def _rest(self, length: int, key: Sequence[int]) -> Window:
        """A piece of the text, from anywhere."""
        places = self._filler.num_tokens - length
        if places < 1:
            raise ConfigError(f"the training text has {self._filler.num_tokens} tokens, too few; add text")
        return window(self._filler, hash_integers([*key, length]) % places, length)
