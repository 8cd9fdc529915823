"""What a decoding pass reads of its rows: one buffer on the device, filled by one copy a pass.

    drawn    tokens of the latest draw, written by the device itself
    numbers  of each row: its token as the host knows it, where in this buffer its token is to be read, page and place of the
             new entry, its length, the pages of its states

A token that the host does not know yet is read from `drawn`, one that it knows from `numbers`: so a pass can be launched
before the draw in front of it was looked at. The places never change, so a recorded pass reads whatever was written last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN, SOURCE, PAGE, SLOT, LENGTH, STATE = range(6)  # rows of `numbers`; the states of all groups come last


class DecodeInputs:
    """The buffer.

    Args:
        most: rows of a pass, and tokens of a step's draw, at most.
        groups: cache groups, each with a page of states a row.
        device: where it is.
    """

    def __init__(self, most: int, groups: int, device: torch.device) -> None:
        self.most, self.groups, self.device = most, groups, device
        self._fields = STATE + groups
        self._all = torch.zeros(most * (1 + self._fields), dtype=torch.int64, device=device)
        self._place: dict[str, int] = {}

    def numbers_FB(self, rows: int) -> Tensor:
        """The numbers of a pass of so many rows, `[5 + groups, rows]`."""
        return self._all[self.most : self.most + self._fields * rows].view(self._fields, rows)

    def fill(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Write the numbers of the rows, each in the order above; returns them `[5 + groups, rows]` on the device."""
        assert len(rows) <= self.most, f"{len(rows)} rows in a buffer for {self.most}"
        there_FB = self.numbers_FB(len(rows))
        here_FB = torch.tensor(rows).T.contiguous()
        if self.device.type == "cuda":
            here_FB = here_FB.pin_memory()
        return there_FB.copy_(here_FB, non_blocking=True)

    def ids_B1(self, rows: int) -> Tensor:
        """Tokens of the rows that were written last, those that the host does not know included."""
        return self._all[self.numbers_FB(rows)[SOURCE]][:, None]

    def source(self, row: int, awaited: str | None) -> int:
        """Where row `row` finds its token; `awaited`: the sequence, if the host does not know it."""
        return self.most + row if awaited is None else self._place[awaited]

    def forget_drawn(self) -> None:
        """The pass that reads what was drawn last is launched; the next draw may be written over it."""
        self._place.clear()

    def keep_drawn(self, names: Sequence[str], ids_N: Tensor) -> None:
        """Tokens of a draw, and whose they are."""
        first = len(self._place)
        assert first + len(names) <= self.most, f"{first + len(names)} tokens drawn in a step of {self.most} rows"
        self._all[first : first + len(names)] = ids_N
        self._place.update({name: first + at for at, name in enumerate(names)})
