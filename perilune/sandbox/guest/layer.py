"""A file-system layer: what a sandbox changed over its template, read from and written into overlay upper folders.

An entry is a JSON object: `path` (relative, no leading slash), `type` (folder file link hard fifo gone), `mode`, `uid`, `gid`,
`mtime` (ns), `xattrs` (hex); folders may be `opaque` (the template's content is hidden), links have `to`, files `size` and,
once stored, `chunks`: one digest for each `CHUNK` bytes, null for zeros. `gone` marks what was deleted from the template.
Sockets are not captured: nothing listens on them after a restore.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

CHUNK = 65536
"""Bytes of a file that are stored, named by hash and shared as one piece."""
DEEPEST, LONGEST_PATH = 200, 3500
"""Folders within folders and characters of a path that a layer can hold."""
ZEROS = bytes(CHUNK)
_LENGTH = struct.Struct("!I")
_HOLE, _SAME = 0xFFFFFFFF, 0xFFFFFFFE
SAME = b""
"""Stands in a stream's chunks for one that is as it was in the stream before."""
_OPAQUE = "user.overlay.opaque"


class NoRoom(Exception):
    """The folders that a layer is written into are full."""


def digest(data: bytes) -> str:
    """Name of a blob: SHA-256, hexadecimal; where the processor has instructions for it, twice as fast as blake2b."""
    return hashlib.sha256(data).hexdigest()


def place(path: str, trees: Sequence[str]) -> tuple[int, str]:
    """Which upper folder a guest path lies in, and where in it. `trees` are the mount points; tree 0 is the root, ""."""
    best = 0
    for number, tree in enumerate(trees):
        if tree and (path == tree or path.startswith(tree + "/")) and len(tree) > len(trees[best]):
            best = number
    return best, path[len(trees[best]) :].lstrip("/")


def walk(fd: int, tree: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Entries of one upper folder, parents first, each with an open descriptor of a file's content (else -1).

    Args:
        fd: the upper folder. It is not the guest's view, so nothing in it can lead out of it.
        tree: where it is mounted in the guest, without slashes at the ends.
    """
    seen: dict[int, str] = {}

    def folder(fd: int, prefix: str, depth: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        if depth > DEEPEST or len(prefix) > LONGEST_PATH:
            raise OSError(
                errno.ENAMETOOLONG, f"folders deeper than {DEEPEST} or longer than {LONGEST_PATH}: /{prefix[:80]}…"
            )
        with os.scandir(fd) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            path = f"{prefix}/{name}" if prefix else name
            entry = _entry(path, info)
            if stat.S_ISDIR(info.st_mode):
                child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                try:
                    entry |= {"type": "folder", **_xattrs(child)}
                    yield entry, -1
                    yield from folder(child, path, depth + 1)
                finally:
                    os.close(child)
            elif stat.S_ISREG(info.st_mode):
                if info.st_nlink > 1 and info.st_ino in seen:
                    yield {"path": path, "type": "hard", "to": seen[info.st_ino]}, -1
                    continue
                seen[info.st_ino] = path
                child = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
                try:
                    yield entry | {"type": "file", "size": info.st_size, **_xattrs(child)}, child
                finally:
                    os.close(child)
            elif stat.S_ISLNK(info.st_mode):
                yield entry | {"type": "link", "to": os.readlink(name, dir_fd=fd)}, -1
            elif stat.S_ISFIFO(info.st_mode):
                yield entry | {"type": "fifo"}, -1
            elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                yield {"path": path, "type": "gone"}, -1

    if tree:
        yield _entry(tree, os.fstat(fd)) | {"type": "folder"}, -1
    yield from folder(fd, tree)


def _entry(path: str, info: os.stat_result) -> dict[str, Any]:
    return {
        "path": path, "mode": stat.S_IMODE(info.st_mode), "uid": info.st_uid, "gid": info.st_gid, "mtime": info.st_mtime_ns,
    }  # fmt: skip


def _xattrs(fd: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = [name for name in os.listxattr(fd) if name.startswith("user.")]
    if _OPAQUE in names:
        found["opaque"] = True
    kept = {name: os.getxattr(fd, name).hex() for name in names if not name.startswith("user.overlay.")}
    return found | ({"xattrs": kept} if kept else {})


def stream(
    fds: Sequence[int],
    trees: Sequence[str],
    write: Callable[[bytes], None],
    changed: Mapping[str, Collection[int]] | None = None,
) -> None:
    """Send all entries with their content: each a length and JSON, a file's chunks after it; a zero length ends it.

    Args:
        changed: path -> numbers of the chunks that can have changed since the last stream; of a file in it the others are not sent.
    """
    for fd, tree in zip(fds, trees):
        for entry, content in walk(fd, tree):
            body = _json(entry)
            write(_LENGTH.pack(len(body)) + body)
            if content >= 0:
                _stream_file(content, entry["size"], write, None if changed is None else changed.get(entry["path"]))
    write(_LENGTH.pack(0))


def _json(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode()


def _stream_file(fd: int, size: int, write: Callable[[bytes], None], changed: Collection[int] | None) -> None:
    data_at = 0
    for start in range(0, size, CHUNK):
        length = min(CHUNK, size - start)
        if changed is not None and start // CHUNK not in changed:
            write(_LENGTH.pack(_SAME))
            continue
        if data_at < start:
            try:
                data_at = os.lseek(fd, start, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left.
                data_at = size
        data = b"" if data_at >= start + length else os.pread(fd, length, start)
        if not data or data == ZEROS[: len(data)]:
            write(_LENGTH.pack(_HOLE))
        else:
            write(_LENGTH.pack(length) + data.ljust(length, b"\0"))


def read_stream(read: Callable[[int], bytes], limit: int) -> Iterator[tuple[dict[str, Any], list[bytes | None]]]:
    """The other end of `stream`, one entry with its chunks at a time (None: zeros; `SAME`: as in the stream before).

    Args:
        read: returns exactly that many bytes.
        limit: bytes of content after which the stream is refused.

    Raises:
        ValueError: the stream breaks its rules.
    """
    total = 0
    while length := _LENGTH.unpack(read(4))[0]:
        if length > 1 << 20:
            raise ValueError(f"an entry of {length} bytes")
        entry = json.loads(read(length))
        check(entry)
        chunks: list[bytes | None] = []
        for start in range(0, entry.get("size", 0) if entry["type"] == "file" else 0, CHUNK):
            marker = _LENGTH.unpack(read(4))[0]
            wanted = min(CHUNK, entry["size"] - start)
            if marker not in (_HOLE, _SAME, wanted):
                raise ValueError(f"{entry['path']}: a piece of {marker} bytes where {wanted} belong")
            total += wanted if marker == wanted else 0
            if total > limit:
                raise ValueError(f"more than {limit} bytes of content")
            chunks.append(read(wanted) if marker == wanted else None if marker == _HOLE else SAME)
        yield entry, chunks


def check(entry: Any) -> None:
    """Raise ValueError unless `entry` is a well-formed layer entry whose path stays inside of the root."""
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise ValueError("an entry without a path")
    for path in (entry["path"], entry.get("to") if entry.get("type") == "hard" else "x"):
        if not isinstance(path, str) or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError(f"a path that leaves the root: {path!r}")
    kind = entry.get("type")
    if kind not in ("folder", "file", "link", "hard", "fifo", "gone"):
        raise ValueError(f"{entry['path']}: unknown type {kind!r}")
    numbers = {"hard": (), "gone": ()}.get(
        kind, ("mode", "uid", "gid", "mtime", *(("size",) if kind == "file" else ()))
    )
    for name in numbers:
        if type(entry.get(name)) is not int or (entry[name] < 0 and name != "mtime"):
            raise ValueError(f"{entry['path']}: {name}={entry.get(name)!r} is no such number")
    if kind == "link" and (not isinstance(entry.get("to"), str) or not entry["to"] or "\0" in entry["to"]):
        raise ValueError(f"{entry['path']}: a link to {entry.get('to')!r}")


def restore(entries: Sequence[dict[str, Any]], uppers: Sequence[str], trees: Sequence[str], blobs: str) -> None:
    """Write a stored layer into fresh upper folders, every chunk checked against its name.

    Args:
        entries: the layer, parents before children.
        uppers: one empty folder for each of `trees`.
        blobs: the store's blob folder.

    Raises:
        ValueError: an entry breaks its rules, or a blob is missing, truncated or corrupt (which one is said).
        NoRoom: it does not fit.
    """
    try:
        _restore(entries, uppers, trees, blobs)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG):
            raise NoRoom(str(error)) from error
        raise


def _restore(entries: Sequence[dict[str, Any]], uppers: Sequence[str], trees: Sequence[str], blobs: str) -> None:
    folders: dict[str, dict[str, Any]] = {}

    def target(path: str) -> str:
        number, inside = place(path, trees)
        parent = inside.rpartition("/")[0]
        # A parent that this layer did not make as a folder could be a link that leads out of the upper folder.
        if parent and path[: len(path) - len(inside)] + parent not in folders:
            raise ValueError(f"{path}: its folder is not part of the layer")
        return os.path.join(uppers[number], inside)

    for entry in entries:
        check(entry)
        path = target(entry["path"])
        kind = entry["type"]
        if kind == "folder":
            if place(entry["path"], trees)[1]:
                os.mkdir(path)
            folders[entry["path"]] = entry
            if entry.get("opaque"):
                os.setxattr(path, _OPAQUE, b"y")
        elif kind == "file":
            _restore_file(path, entry, blobs)
        elif kind == "link":
            os.symlink(entry["to"], path)
        elif kind == "hard":
            os.link(target(entry["to"]), path, follow_symlinks=False)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            os.mknod(path, stat.S_IFCHR, 0)
        if kind in ("file", "link", "fifo"):
            _attributes(path, entry)
    for name in reversed(folders):
        _attributes(os.path.join(uppers[place(name, trees)[0]], place(name, trees)[1]), folders[name])


def _restore_file(path: str, entry: dict[str, Any], blobs: str) -> None:
    chunks = entry.get("chunks")
    if not isinstance(chunks, list) or len(chunks) != -(-entry["size"] // CHUNK):
        raise ValueError(f"{entry['path']}: its chunks do not add up to {entry['size']} bytes")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, entry["size"])
        for number, name in enumerate(chunks):
            if name is not None:
                data = load(blobs, name, min(CHUNK, entry["size"] - number * CHUNK))
                if os.pwrite(fd, data, number * CHUNK) != len(data):
                    raise ValueError(f"{entry['path']}: no room for its content")
    finally:
        os.close(fd)


def load(blobs: str, name: str, size: int | None = None) -> bytes:
    """Content of a blob, checked against its name.

    Args:
        size: bytes that it must have, where known.

    Raises:
        ValueError: it is missing, truncated or corrupt; the message names it.
    """
    if not isinstance(name, str) or len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise ValueError(f"{name!r} is no blob's name")
    try:
        with open(f"{blobs}/{name[:2]}/{name[2:]}", "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise ValueError(f"blob {name} is missing") from None
    if size is not None and len(data) != size:
        raise ValueError(f"blob {name} is truncated: {len(data)} bytes where {size} belong")
    if digest(data) != name:
        raise ValueError(f"blob {name} is corrupt: its content has another hash")
    return data


def _attributes(path: str, entry: dict[str, Any]) -> None:
    os.chown(path, entry["uid"], entry["gid"], follow_symlinks=False)
    if entry["type"] != "link":
        os.chmod(path, entry["mode"])
    for name, value in entry.get("xattrs", {}).items():
        os.setxattr(path, name, bytes.fromhex(value), follow_symlinks=False)
    os.utime(path, ns=(entry["mtime"], entry["mtime"]), follow_symlinks=False)
