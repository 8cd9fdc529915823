"""Writes a cpio archive ("newc") that the Linux kernel unpacks as a guest's root: no tool, no root rights, the same bytes each time."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

DEVICES = {"dev/console": (5, 1), "dev/null": (1, 3)}
"""Needed before the guest mounts its /dev."""


class Archive:
    """Entries of an archive, each written as it is added; `close` ends it.

    A path that was added before is not added again, so what is added first wins. Parents of a path are added with it.

    Args:
        file: opened for writing in binary.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._known, self._number = file, {""}, 0
        for path, device in DEVICES.items():
            self._add(path, stat.S_IFCHR | 0o600, b"", device)

    def file_of(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Add a regular file."""
        self._add(path, stat.S_IFREG | mode, data)

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Add a folder."""
        self._add(path, stat.S_IFDIR | mode, b"")

    def link(self, path: str, to: str) -> None:
        """Add a symbolic link."""
        self._add(path, stat.S_IFLNK | 0o777, os.fsencode(to))

    def tree(self, root: Path, skip: tuple[str, ...] = ()) -> None:
        """Add what is in a folder of the host, as root's; paths that start with one of `skip` are left out."""
        for folder, folders, files in os.walk(root):
            folders.sort()
            inside = os.path.relpath(folder, root).removeprefix(".").lstrip("/")
            folders[:] = [name for name in folders if not f"{inside}/{name}/".lstrip("/").startswith(skip or ("\0",))]
            for name in [*folders, *sorted(files)]:
                path, source = f"{inside}/{name}".lstrip("/"), os.path.join(folder, name)
                info = os.lstat(source)
                if path.startswith(skip or ("\0",)):
                    continue
                if stat.S_ISLNK(info.st_mode):
                    self.link(path, os.readlink(source))
                elif stat.S_ISDIR(info.st_mode):
                    self.folder(path, stat.S_IMODE(info.st_mode))
                elif stat.S_ISREG(info.st_mode):
                    self.file_of(path, Path(source).read_bytes(), stat.S_IMODE(info.st_mode))

    def _add(self, path: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        if path in self._known:
            return
        self.folder(path.rpartition("/")[0])
        self._known.add(path)
        self._write(path, mode, data, device)

    def _write(self, path: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        self._number += 1
        name = os.fsencode(path) + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        # inode, mode, uid, gid, links, time, size, device of the file system, of a device file, name's length, checksum
        numbers = (self._number, mode, 0, 0, links, 0, len(data), 0, 0, *device, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % number for number in numbers) + name
        self.file.write(header + bytes(-len(header) % 4) + data + bytes(-len(data) % 4))

    def close(self) -> None:
        """Write the end."""
        self._write("TRAILER!!!", 0, b"")
