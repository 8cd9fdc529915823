"""What is known of a snapshot: one line of JSON, and the hash of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from perilune.errors import SandboxError
from perilune.sandbox.guest import layer
from perilune.sandbox.protocol import StoreDamaged

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A published snapshot.

    Attributes:
        id: its name.
        sandbox, generation: what it was taken of.
        driver, machine, contains: which driver can resume it, on which processor, and whether it holds files or a whole machine.
        template_hash, spec: what the sandbox was made from.
        layer: blob with the entries of its changed files.
        parent: the snapshot before it, or None; only a note, for it stands on its own.
        created: seconds since 1970.
        entries, bytes, new_bytes: changed files, their stored content, and what of it was not in the store before.
        processes: processes that ran when it was taken; a snapshot of files does not bring them back.
    """

    id: str
    sandbox: str
    generation: str
    driver: str
    machine: str
    contains: str
    template_hash: str
    spec: dict[str, Any]
    layer: str
    parent: str | None
    created: float
    entries: int
    bytes: int
    new_bytes: int
    processes: int
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As it lies in a store; `parse_record` reads it."""
        body = json.dumps(asdict(self), sort_keys=True)
        return f"{body}\n{layer.digest(body.encode())}\n".encode()


def parse_record(record: bytes, what: str) -> Snapshot:
    """A snapshot's record. Raises StoreDamaged."""
    try:
        body, checksum, rest = record.split(b"\n")
        if rest or layer.digest(body) != checksum.decode():
            raise ValueError("its checksum does not fit")
        values = json.loads(body)
        if values.get("format") != FORMAT:
            raise ValueError(f"it has format {values.get('format')}, this version reads {FORMAT}")
        return Snapshot(**values)
    except (ValueError, TypeError) as error:
        raise StoreDamaged(f"{what} is damaged: {error}") from None


def check_name(name: str) -> str:
    """The name. Raises SandboxError for one that no snapshot can have."""
    if not name.startswith("snap-") or not name.removeprefix("snap-").isalnum():
        raise SandboxError(f"{name!r} is no snapshot's name; they look like snap-0123456789ab")
    return name
