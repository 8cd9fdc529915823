"""Linux system calls that Python 3.11 has no function for, through libc: namespaces, mounts, privileges.

Every call raises `OSError` with the call's name in it, so that a failed set-up says which step the kernel refused.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: what package managers and servers use."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
    _libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    _libc.syscall.restype = ctypes.c_long


def _checked(result: int, call: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def machine() -> str:
    """The processor's name as the tables here spell it."""
    return platform.machine()


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` (CLONE_NEW…)."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount `source` on `target`; `kind` is a file system's name, empty for binds and changes of flags."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, os.fsencode(data) or None
    )
    _checked(result, f"mount {kind or 'bind'} on {target}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show the file or folder `source` at `target` as well."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def change_root(root: str) -> None:
    """Make the mount point `root` the root of this mount namespace and drop the old one."""
    os.chdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT[machine()], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount2 of the old root")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """Name of this UTS namespace."""
    _checked(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def die_with_parent(signal: int) -> None:
    """Have the kernel send `signal` when the parent ends; a fork does not inherit it."""
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def set_dumpable(on: bool) -> None:
    """With False no process of the sandbox can trace this one or look into its /proc folder."""
    _checked(_libc.prctl(PR_SET_DUMPABLE, int(on), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def drop_privileges() -> None:
    """Reduce this process, for good, to `KEPT_CAPABILITIES` of its user namespace and forbid new privileges."""
    for capability in range(64):
        if capability not in KEPT_CAPABILITIES and _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # The kernel's last capability is behind us.
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    kept = sum(1 << capability for capability in KEPT_CAPABILITIES)
    header = struct.pack("Ii", 0x20080522, 0)
    # Two 32-bit halves of (effective, permitted, inheritable).
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    _checked(_libc.syscall(_CAPSET[machine()], header, sets), "capset")
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def install_filter(program: bytes) -> None:
    """Install a seccomp filter: `program` is an array of `struct sock_filter`. Needs no-new-privileges."""
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
    _checked(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.addressof(head), 0, 0), "prctl(PR_SET_SECCOMP)")


def sync_file_system(fd: int) -> None:
    """Flush the whole file system that `fd` is on, or all where there is no call for one."""
    if sys.platform != "linux":
        return os.sync()
    _checked(_libc.syncfs(fd), "syncfs")
