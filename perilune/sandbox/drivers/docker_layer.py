"""Layers of files as an engine's tar archives, and back."""

from __future__ import annotations

import datetime
import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.sandbox.guest import layer


def changed_folder(path: str, stat: Mapping[str, Any]) -> dict[str, Any]:
    """A folder of the image in which something changed; the engine tells its mode and its time only."""
    sticky = 0o1000 if stat["mode"] & (1 << 20) else 0
    return {
        "path": path,
        "type": "folder",
        "mode": stat["mode"] & 0o777 | sticky,
        "uid": 0,
        "gid": 0,
        "mtime": int(datetime.datetime.fromisoformat(stat["mtime"]).timestamp()) * 10**9,
    }


def entry_of(path: str, member: tarfile.TarInfo, above: str) -> dict[str, Any] | None:
    """A member of the engine's archive as an entry of a layer; None for what is not captured."""
    facts = {
        "path": path,
        "mode": member.mode & 0o7777,
        "uid": member.uid,
        "gid": member.gid,
        "mtime": int(member.mtime * 10**9),
    }
    if member.isdir():
        return facts | {"type": "folder"}
    if member.isreg():
        return facts | {"type": "file", "size": member.size}
    if member.issym():
        return facts | {"type": "link", "to": member.linkname}
    if member.islnk():
        return {"path": path, "type": "hard", "to": f"{above.rstrip('/')}/{member.linkname}".strip("/")}
    return facts | {"type": "fifo"} if member.isfifo() else None


def as_tar(entries: Sequence[Mapping[str, Any]], blobs: str) -> bytes:
    """A layer's entries as an archive that the engine unpacks."""
    kinds = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}
    data = io.BytesIO()
    # An engine gives a hard link's mode and time to the file that it leads to.
    facts = {entry["path"]: entry for entry in entries if entry["type"] != "gone"}
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as file:
        for entry in entries:
            if entry["type"] == "gone":
                continue
            member = tarfile.TarInfo(entry["path"])
            member.type = kinds.get(entry["type"], tarfile.REGTYPE)
            member.linkname = entry.get("to", "")
            known = facts.get(entry["to"], entry) if entry["type"] == "hard" else entry
            member.mode, member.uid, member.gid = known.get("mode", 0o644), known.get("uid", 0), known.get("gid", 0)
            member.mtime = known.get("mtime", 0) // 10**9
            content = b""
            if entry["type"] == "file":
                left, parts = entry["size"], []
                for name in entry["chunks"]:
                    length = min(layer.CHUNK, left)
                    parts.append(bytes(length) if name is None else layer.load(blobs, name, length))
                    left -= length
                content = b"".join(parts)
                member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return data.getvalue()
