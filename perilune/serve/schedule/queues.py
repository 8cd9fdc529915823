"""Sequences that wait, in a queue for each class, and the patience of those that find no pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter

from perilune.serve.schedule.sequence import WAITING, Sequence

PATIENCE = 64  # sequences that may overtake one that finds no pages


importance = attrgetter("importance")  # sorts what goes first to the front


class Queues:
    """Waiting sequences. One that ends while it waits is told to `leave`, and passed over when it comes up.

    Args:
        classes: how many.
    """

    def __init__(self, classes: int) -> None:
        self._heaps: list[list[tuple[int, int, Sequence]]] = [[] for _ in range(classes)]
        self._counts = [0] * classes
        self._overtaken: dict[str, tuple[Sequence, int]] = {}  # those that found no pages, and by how many

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, class by class, in no particular order."""
        for heap in self._heaps:
            yield from (sequence for _, _, sequence in heap if sequence.state == WAITING)

    def count(self, kind: int) -> int:
        """Sequences of a class that wait."""
        return self._counts[kind]

    def push(self, sequence: Sequence) -> None:
        """A sequence waits from now on."""
        sequence.state = WAITING
        self._counts[sequence.kind] += 1
        heapq.heappush(self._heaps[sequence.kind], (*importance(sequence), sequence))

    def head(self, kind: int) -> Sequence | None:
        """The most important sequence of a class."""
        heap = self._heaps[kind]
        while heap and heap[0][2].state != WAITING:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self, kind: int) -> None:
        """The head of a class waits no more; all that found no pages have been overtaken."""
        _, _, sequence = heapq.heappop(self._heaps[kind])
        self.leave(sequence)
        for name, (other, count) in self._overtaken.items():
            self._overtaken[name] = other, count + 1

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence waits no more."""
        self._counts[sequence.kind] -= 1
        self._overtaken.pop(sequence.name, None)

    def found_no_pages(self, sequence: Sequence) -> None:
        """Note that others may overtake it."""
        self._overtaken.setdefault(sequence.name, (sequence, 0))

    def lacks_pages(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence found no pages when it was last asked for."""
        return sequence.name in self._overtaken

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether a more important one has been overtaken too often, so that pages must come free for it first."""
        return any(
            count >= PATIENCE and importance(other) < importance(sequence) for other, count in self._overtaken.values()
        )

    def position(self, sequence: Sequence) -> int:
        """Sequences of its class in front of a waiting one; 0 if it does not wait."""
        if sequence.state != WAITING:
            return 0
        return sum(other.kind == sequence.kind and importance(other) < importance(sequence) for other in self)
