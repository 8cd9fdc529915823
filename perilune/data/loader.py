"""Batches for the trainer: a pure function of (seed, step, rank).

There is nothing to save but the step, and nothing to skip on resume. The batch of a step is one list of windows, of
which rank r of W takes the r-th part: any number of processes sees the same global batch, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.data.curriculum import Curriculum
from perilune.data.mixture import Mixture
from perilune.data.packing import PlacedImage
from perilune.data.sources import Source
from perilune.errors import ConfigError
from perilune.model.vision import ImageBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed windows on the CPU.

    Attributes:
        ids_BT: int64.
        targets_BT: int64, -100 where nothing is predicted.
        starts_BT: bool, True at the first token of each document.
        images: of each row; empty if no row has any.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    starts_BT: Tensor
    images: tuple[tuple[PlacedImage, ...], ...] = ()

    @property
    def image_rows(self) -> int:
        """Rows that have images."""
        return sum(1 for own in self.images if own)

    def image_batch(self) -> ImageBatch | None:
        """All images packed for the model, with the flat positions of their media pads; None if there is none."""
        length = self.ids_BT.shape[1]
        placed = [(row * length + each.position, each.image) for row, own in enumerate(self.images) for each in own]
        if not placed:
            return None
        positions = torch.cat([torch.arange(first, first + image.tokens) for first, image in placed])
        return ImageBatch.collate([image for _, image in placed], positions)

    def without_images(self) -> Batch:
        """The rows of text alone; all rows, if every one has images."""
        rows = [row for row, own in enumerate(self.images) if not own]
        if not rows:
            return self
        return Batch(self.ids_BT[rows], self.targets_BT[rows], self.starts_BT[rows])

    def split(self, rows: int) -> list[Batch]:
        """Cut into batches of `rows` rows; the last may have fewer."""
        parts = zip(*(t.split(rows) for t in (self.ids_BT, self.targets_BT, self.starts_BT)), strict=True)
        return [Batch(*part, self.images[n * rows : (n + 1) * rows]) for n, part in enumerate(parts)]


class Loader:
    """Draws each step's windows from a mixture of sources.

    Attributes:
        curriculum: which window length a step uses.
        fingerprint: hex digest of everything that decides the batches but the rank and world size; a resumed run must
            have the same one.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Source, float]],
        curriculum: Curriculum,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Set up.

        Args:
            sources: name -> (source, weight); weights are normalised.
            curriculum: stages of window length.
            seed: of the order and of the synthetic tasks.
            rank, world: this process among those that share a batch.

        Raises:
            ConfigError: a stage has fewer windows a step than `world`, or a number that `world` does not divide.
        """
        assert 0 <= rank < world, f"rank {rank} outside a world of {world}"
        for seq_len in curriculum.seq_lens:
            rows = curriculum.tokens_per_step // seq_len
            if rows % world:
                raise ConfigError(
                    f"{rows} windows of {seq_len} tokens a step cannot be shared by {world} processes; make "
                    f"tokens_per_step={curriculum.tokens_per_step} a multiple of {seq_len * world}"
                )
        self.curriculum = curriculum
        self._sources = {name: source for name, (source, _) in sources.items()}
        self._number = {name: number for number, name in enumerate(sources)}
        self._mixture = Mixture({name: weight for name, (_, weight) in sources.items()})
        self._seed, self._rank, self._world = seed, rank, world
        parts = [seed, curriculum.tokens_per_step, curriculum.seq_lens, curriculum.first_steps, self._mixture.counts]
        parts += [source.fingerprint for source in self._sources.values()]
        self.fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()

    def batch(self, step: int) -> Batch:
        """This rank's windows of optimizer step `step`, counted from 0: `[rows / world, seq_len]`."""
        place = self.curriculum.locate(step)
        rows = self.curriculum.rows(place)
        own = rows // self._world
        first = place.stage_step * rows + self._rank * own
        windows = []
        for sample in range(first, first + own):
            name, index = self._mixture.assign(sample)
            key = (self._seed, place.stage, self._number[name])
            windows.append(self._sources[name].window(index, place.seq_len, key))
        return Batch(
            torch.from_numpy(np.stack([each.ids for each in windows])),
            torch.from_numpy(np.stack([each.targets for each in windows])),
            torch.from_numpy(np.stack([each.starts for each in windows])),
            tuple(each.images for each in windows) if any(each.images for each in windows) else (),
        )
