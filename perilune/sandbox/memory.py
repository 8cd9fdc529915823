"""Memory that a sandbox really holds: the proportional share of its processes' pages, and its files in memory.

Clones share pages, so the sum of what each could use, or of what each has mapped, says little: PSS divides a shared page among
those that map it, and the sum over all sandboxes is what the machine has spent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one sandbox or of several.

    Attributes:
        pss: proportional share of mapped pages.
        rss: mapped pages, shared ones counted in full.
        files: files in memory that no process maps.
        exact: every process let itself be read; else `rss` stands for the `pss` of those that did not.
    """

    pss: int = 0
    rss: int = 0
    files: int = 0
    exact: bool = True

    @property
    def total(self) -> int:
        """What would be free if it ended, near enough."""
        return self.pss + self.files

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.pss + other.pss, self.rss + other.rss, self.files + other.files, self.exact and other.exact)


def measured(pids: Iterable[int], files: int = 0) -> Memory:
    """The memory of these processes; one that has ended counts nothing."""
    total = Memory(files=files)
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            try:
                values = dict(_fields(Path(f"/proc/{pid}/smaps_rollup").read_text()))
                total += Memory(values.get("Pss", 0), values.get("Rss", 0))
            except PermissionError:
                # Without root, a process that is not dumpable shows its size only.
                rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
                total += Memory(rss, rss, exact=False)
    return total


def _fields(text: str) -> Iterable[tuple[str, int]]:
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            yield name, int(rest.split()[0]) * 1024


def available() -> int:
    """Bytes that new programs may take on this machine: what is free or can be freed, within this process's control group."""
    free = next(
        (size for name, size in _fields("\n" + Path("/proc/meminfo").read_text()) if name == "MemAvailable"), 1 << 30
    )
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, free)
