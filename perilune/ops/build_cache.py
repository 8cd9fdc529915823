"""A user's folder of compiled kernels: content-checked files that appear whole, in a directory nobody else can write.

A file is named `<stem>-<key>-<digest><suffix>`. The key stands for everything that the content depends on; the digest is
of the content itself, so a truncated or altered file is noticed before it is used and is made again. Files appear by
rename: any number of processes may build at once.

PERILUNE_CACHE names another cache directory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path


def key(*parts: str | bytes) -> str:
    """A short name for these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def source_key(source: Path, headers: Iterable[Path], *parts: str) -> str:
    """The key of a source file, the headers that it may include, and whatever else decides about the result."""
    texts = (part for header in headers for part in (header.name, header.read_bytes()))
    return key(source.read_bytes(), *texts, *parts)


def directories(kind: str) -> Iterator[Path]:
    """Folders named `kind` that exist, are ours and that nobody else can write, best first."""
    base = os.environ.get("PERILUNE_CACHE")
    if base:
        wanted = [Path(base).expanduser()]
    else:
        wanted = [Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "perilune"]
    wanted.append(Path(tempfile.gettempdir()) / f"perilune-{os.getuid()}")
    for directory in wanted:
        directory = directory / kind
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            status, parent = directory.stat(), directory.parent.stat()
        except OSError:
            continue
        if status.st_uid == parent.st_uid == os.getuid() and not status.st_mode & 0o022:
            yield directory


def matching(kind: str, stem: str, name: str, suffix: str) -> Iterator[Path]:
    """Cached files with this stem and key whose content is what their name says."""
    for directory in directories(kind):
        for path in sorted(directory.glob(f"{stem}-{name}-*{suffix}")):
            try:
                whole = _digest(path.read_bytes()) == path.stem.rsplit("-", 1)[1]
            except OSError:
                continue
            if whole:
                yield path


def written(kind: str, stem: str, name: str, suffix: str, content: bytes) -> Iterator[Path]:
    """The file under its name, written in one folder after the other for as long as the caller asks for another."""
    for directory in directories(kind):
        final = directory / f"{stem}-{name}-{_digest(content)}{suffix}"
        try:
            handle, scratch = tempfile.mkstemp(prefix=f".{stem}-", dir=directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(scratch, final)
            except OSError:
                Path(scratch).unlink(missing_ok=True)
                raise
        except OSError:
            continue
        yield final


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
