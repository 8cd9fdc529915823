"""What there is to know of this machine before a guest boots: whether KVM runs a guest, and how fast the processor's counter counts."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MEASURED_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Host:
    """What guests run on.

    Attributes:
        accelerator: "kvm" where a guest of ours boots on it, else "tcg"; an open /dev/kvm says nothing.
        khz: counts of the time stamp counter in a millisecond.
    """

    accelerator: str
    khz: int


def find_out(note: Path, key: list[str], boots: Callable[[Host], bool]) -> Host:
    """What is noted for this machine, or found out and noted.

    Args:
        note: a file.
        key: what the findings depend on besides the machine.
        boots: tries whether a guest answers.
    """
    key = [os.uname().nodename, os.uname().release, *key]
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        known = json.loads(note.read_text())
        if known.pop("for") == key:
            return Host(**known)
    host = Host("kvm", counter_khz())
    if not os.access("/dev/kvm", os.R_OK | os.W_OK) or not boots(host):
        host = Host("tcg", host.khz)
    note.parent.mkdir(parents=True, exist_ok=True)
    temporary = note.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"for": key, **asdict(host)}))
    os.replace(temporary, note)
    return host


def counter_khz() -> int:
    """Thousands of counts a second of this processor's time stamp counter, measured against the system's clock.

    The kernel's own figure is for its eyes only, and the frequency in /proc/cpuinfo may be that of the moment.
    """
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    count = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))

    def pair() -> tuple[int, int]:
        """Both clocks at one instant: the tightest of some tries."""
        tries = []
        for _ in range(50):
            before, counted, after = time.monotonic_ns(), count(), time.monotonic_ns()
            tries.append((after - before, (before + after) // 2, counted))
        return min(tries)[1:]

    (begun, first), _ = pair(), time.sleep(MEASURED_SECONDS)
    ended, last = pair()
    return round((last - first) * 1_000_000 / (ended - begun))
