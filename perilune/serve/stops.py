"""Stop strings in a stream: nothing that may turn out to be the start of one leaves before it is certain."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text before the first stop string, or behind it.

    The first is the one that ends first; of two that end together, the longer. The emitted text is the same however
    the stream is split, and a stop string is found anywhere in a piece, not only at its end.

    Args:
        stops: the strings.
        include: whether the string that was found is emitted too.

    Attributes:
        stopped: one was found; all text behind it is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.stopped = False

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, text: str) -> str:
        """Add text; returns the text that is certain to stay. After a match, `stopped` is True and all else is dropped."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        self._held = ""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            end, start = min(found)
            return text[: end if self._include else start]
        held = max(self._overlap(text, stop) for stop in self._stops)
        if held:
            text, self._held = text[:-held], text[-held:]
        return text

    def finish(self) -> str:
        """The text still held back, when the stream has ended without a match."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
