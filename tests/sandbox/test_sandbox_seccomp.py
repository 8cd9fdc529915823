"""The filter's call numbers against the kernel's own headers, and its program against an interpreter of classic BPF."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from perilune.sandbox.guest import seccomp

HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"),),
}


@pytest.mark.parametrize("machine", list(HEADERS))
def test_call_numbers_are_the_kernels(machine):
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip(f"the kernel's headers for {machine} are not installed")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text())}
    column = list(seccomp.ARCHITECTURES).index(machine)
    for name, numbers in {**seccomp.REFUSED, **seccomp.FILTERED}.items():
        if name in known or numbers[column] is None:
            assert numbers[column] == known.get(name), name
    assert len(set(known) & set(seccomp.REFUSED)) > 30


def verdict(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the filter returns: classic BPF over `struct seccomp_data`, as the kernel's documentation defines it."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    steps = list(struct.iter_unpack("HBBI", program))
    at = accumulator = 0
    while True:
        code, true, false, k = steps[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code == 0x06:
            return k
        else:
            taken = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += true if taken else false


ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize("machine", list(HEADERS))
def test_the_program_decides_as_its_tables_say(machine):
    program = seccomp.program(machine)
    assert program is not None
    arch, column = seccomp.ARCHITECTURES[machine], list(seccomp.ARCHITECTURES).index(machine)
    call = {name: numbers[column] for name, numbers in seccomp.FILTERED.items()}
    refused = {numbers[column] for numbers in seccomp.REFUSED.values()} - {None}
    for number in range(600):
        if number not in {*refused, *call.values()}:
            assert verdict(program, arch, number, 0xFFFFFFFF, 0xFFFFFFFF) == ALLOW, number
    assert {verdict(program, arch, number) for number in refused if number is not None} == {REFUSE}
    assert verdict(program, arch, call["clone3"]) == UNKNOWN
    assert verdict(program, arch, call["clone"], 0x1200011) == ALLOW
    assert verdict(program, arch, call["clone"], 0x10000000 | 17) == REFUSE
    families = {family: verdict(program, arch, call["socket"], family) for family in range(46)}
    assert [family for family, found in families.items() if found == ALLOW] == [1, 2, 10, 16]
    assert (
        verdict(program, arch, call["ioctl"], 0, 0x5412) == REFUSE == verdict(program, arch, call["ioctl"], 0, 0x541C)
    )
    assert verdict(program, arch, call["ioctl"], 0, 0x5401) == ALLOW
    # 64-bit arguments whose lower half is what the kernel looks at.
    assert verdict(program, arch, call["ioctl"], 0, 0x100005412) == REFUSE
    # Tracking its own writes, never holding up the kernel.
    assert (
        verdict(program, arch, call["userfaultfd"], 1) == ALLOW == verdict(program, arch, call["userfaultfd"], 0x80801)
    )
    assert (
        verdict(program, arch, call["userfaultfd"], 0) == REFUSE == verdict(program, arch, call["userfaultfd"], 0x80800)
    )
    other = next(value for value in seccomp.ARCHITECTURES.values() if value != arch)
    assert verdict(program, other, 0) == REFUSE == verdict(program, 0x40000003, 0)
    if machine == "x86_64":
        assert verdict(program, arch, 0x40000000 | 165) == UNKNOWN


def test_a_machine_without_a_table_gets_no_filter():
    assert seccomp.program("riscv64") is None
