"""The system-call filter of a `proc` guest: a list of refused calls as a classic BPF program.

Refused are calls that change mounts or namespaces, load code into the kernel, reach past namespaces (keyrings, file
handles, vsock, kernel crypto sockets), set clocks, or push input into a terminal. They fail with EPERM, and clone3 with ENOSYS so
that libc falls back to clone, whose flags a filter can read. Calls of another architecture's table are refused whole.
"""

from __future__ import annotations

import errno
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # name: (x86_64, aarch64)
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "syslog": (103, 116), "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
FILTERED: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "ioctl": (16, 29),
    "userfaultfd": (323, 282),
}
"""Refused for some arguments only; clone3 always, with ENOSYS."""
NEW_NAMESPACES = 0x2000000 | 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEW… flags of clone; a time namespace cannot be made by it."""
SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK; the others, AF_VSOCK above all, are not all bound to the network namespace."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""
FAULTS_OF_USERS_ONLY = 1
"""UFFD_USER_MODE_ONLY: without it a guest could hold the kernel up in the middle of a copy; with it, it tracks its own writes."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_ARGUMENT_0, _ARGUMENT_1 = 16, 24


def _errno(code: int) -> int:
    return 0x00050000 | code


def program(machine: str) -> bytes | None:
    """The filter for a machine, or None for one whose call numbers are not in the tables."""
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    refuse, unknown = _errno(errno.EPERM), _errno(errno.ENOSYS)
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, ARCHITECTURES[machine]), (_RETURN, 0, 0, refuse), (_LOAD, 0, 0, 0)
    ]  # fmt: skip
    if machine == "x86_64":  # The x32 table hides behind a bit of the call's number.
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, unknown)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, refuse)]  # pyright: ignore[reportAssignmentType]
    number = {name: numbers[column] for name, numbers in FILTERED.items()}
    code += [(_EQUAL, 0, 1, number["clone3"]), (_RETURN, 0, 0, unknown)]
    code += [(_EQUAL, 0, 4, number["clone"]), (_LOAD, 0, 0, _ARGUMENT_0), (_ANY_BIT, 0, 1, NEW_NAMESPACES)]
    code += [(_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 4, number["userfaultfd"]), (_LOAD, 0, 0, _ARGUMENT_0), (_ANY_BIT, 1, 0, FAULTS_OF_USERS_ONLY)]
    code += [(_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)]
    families = len(SOCKET_FAMILIES)
    code += [(_EQUAL, 0, families + 3, number["socket"]), (_LOAD, 0, 0, _ARGUMENT_0)]
    code += [(_EQUAL, families - place, 0, family) for place, family in enumerate(SOCKET_FAMILIES)]
    code += [(_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 5, number["ioctl"]), (_LOAD, 0, 0, _ARGUMENT_1)]
    code += [(_EQUAL, 1, 0, TERMINAL_INPUT[0]), (_EQUAL, 0, 1, TERMINAL_INPUT[1]), (_RETURN, 0, 0, refuse)]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in code)
