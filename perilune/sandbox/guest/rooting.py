"""The guest's file system: overlays of template folders under one size-limited tmpfs, its own /proc and /dev."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from typing import Any

from perilune.sandbox.guest import layer, linux

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
HIDDEN = ("kcore", "keys", "sysrq-trigger", "timer_list", "kmsg", "latency_stats", "sched_debug")
READ_ONLY = ("sys", "irq", "bus", "fs", "acpi", "scsi")
"""Parts of /proc that belong to the whole machine."""


def make_root(request: dict[str, Any], stored: list[dict[str, Any]]) -> tuple[list[int], str]:
    """Mount the guest's root and make it this process's root.

    Args:
        request: `base` (an empty folder to mount on), `changes` and `scratch` (an empty folder for them if on disk), `trees`
            ([{path, lower}]; tree 0 is the root; lower null = an empty writable folder), `disk_bytes`, `inodes`, `blobs`,
            `hostname`, `network`.
        stored: entries of the layer to start from.

    Returns:
        Descriptors of the upper folders, one a tree, which the guest has no path to; and where they are: "memory" or "disk".

    Raises:
        ValueError: the layer is damaged, or has a link where a folder must be mounted.
    """
    base, trees = request["base"], request["trees"]
    paths = [tree["path"] for tree in trees]
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    limits = f"mode=755,size={request['disk_bytes']},nr_inodes={request['inodes']}"
    linux.mount("perilune", base, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, limits)
    root = f"{base}/root"
    os.mkdir(root)
    # A deleted and remade folder needs an attribute that a tmpfs keeps from Linux 6.6 on.
    on_disk = request["changes"] == "disk" or not _keeps_attributes(root)
    holder = request["scratch"] if on_disk else base
    uppers = []
    for number, tree in enumerate(trees):
        upper, work = f"{holder}/upper{number}", f"{holder}/work{number}"
        os.mkdir(upper)
        os.mkdir(work)
        uppers.append(upper)
        info = os.stat(tree["lower"] or upper)
        os.chmod(upper, 0o1777 if not tree["lower"] else info.st_mode & 0o7777)
    layer.restore(stored, uppers, paths, request["blobs"])
    for number, (tree, upper) in enumerate(zip(trees, uppers)):
        if tree["path"].startswith("dev/"):
            continue
        target = _mount_point(root, tree["path"])
        parts = {"lowerdir": tree["lower"], "upperdir": upper, "workdir": f"{holder}/work{number}"}
        data = ",".join(f"{name}={_escaped(path)}" for name, path in parts.items()) + ",userxattr"
        linux.mount("overlay", target, "overlay", linux.MS_NOSUID | linux.MS_NODEV, data)
    if not os.path.lexists(f"{root}/workspace"):  # Where commands start; an image may have none.
        os.mkdir(f"{root}/workspace")
    _make_proc(_mount_point(root, "proc"))
    _make_dev(_mount_point(root, "dev"), uppers[paths.index("dev/shm")])
    if request["network"] == "host" and os.path.isfile("/etc/resolv.conf"):
        resolver = f"{_mount_point(root, 'etc')}/resolv.conf"
        if os.path.lexists(resolver) and stat.S_ISREG(os.lstat(resolver).st_mode):
            linux.bind(os.path.realpath("/etc/resolv.conf"), resolver)
    fds = [os.open(upper, os.O_RDONLY | os.O_DIRECTORY) for upper in uppers]
    linux.change_root(root)
    linux.set_hostname(request["hostname"])
    if request["network"] != "host":
        _loopback_up()
    return fds, "disk" if on_disk else "memory"


def _mount_point(root: str, path: str) -> str:
    """The folder `path` under `root`, made if missing. A link in it, which the host would follow to its own files, is refused."""
    target = root
    for part in path.split("/") if path else ():
        target = f"{target}/{part}"
        try:
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                raise ValueError(f"{target.removeprefix(root)} is no folder, and /{path} must be mounted there")
        except FileNotFoundError:
            os.mkdir(target)
    return target


def _keeps_attributes(folder: str) -> bool:
    try:
        os.setxattr(folder, "user.perilune", b"1")
        os.removexattr(folder, "user.perilune")
    except OSError:
        return False
    return True


def _escaped(path: str) -> str:
    """A path as an option of an overlay mount."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _make_proc(target: str) -> None:
    linux.mount("proc", target, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    # Second guard beside the system-call filter: no user namespace can be made inside of this one.
    _write(f"{target}/sys/user/max_user_namespaces", "0")
    for name in HIDDEN:
        if os.path.exists(f"{target}/{name}"):
            linux.bind("/dev/null", f"{target}/{name}")
    for name in READ_ONLY:
        if os.path.exists(f"{target}/{name}"):
            linux.bind(f"{target}/{name}", f"{target}/{name}", read_only=True)


def _make_dev(target: str, shared_memory: str) -> None:
    linux.mount("dev", target, "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=64k,nr_inodes=64")
    for name in DEVICES:
        os.close(os.open(f"{target}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        linux.bind(f"/dev/{name}", f"{target}/{name}")
    for name, to in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(to, f"{target}/{name}")
    os.mkdir(f"{target}/pts")
    linux.mount(
        "devpts", f"{target}/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"
    )
    os.symlink("pts/ptmx", f"{target}/ptmx")
    os.mkdir(f"{target}/shm")
    linux.bind(shared_memory, f"{target}/shm")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # SIOCSIFFLAGS with IFF_UP | IFF_RUNNING.
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH22x", b"lo", 0x41))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
