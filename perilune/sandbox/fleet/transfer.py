"""Snapshots between stores: what is missing is fetched by its hash from whoever has it, and counts only if it has that hash.

A peer need not be trusted with content: a wrong or torn piece is asked for elsewhere. The snapshot exists in the target only once
all of it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from perilune.errors import SandboxError
from perilune.sandbox.arrival import Arrival
from perilune.sandbox.connection import Connection
from perilune.sandbox.protocol import NoSuchSandbox
from perilune.sandbox.store import Snapshot, Store, is_named

T = TypeVar("T")
log = logging.getLogger(__name__)


class Peer(Protocol):
    """A store elsewhere. Both raise SandboxError for what it does not have, and when it is gone."""

    def record(self, snapshot: str) -> bytes: ...
    def blob(self, name: str) -> bytes: ...


class HttpPeer:
    """The store of a sandbox service (`perilune sandbox serve`)."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._connection = Connection(url, key)

    def record(self, snapshot: str) -> bytes:
        """A snapshot's record."""
        return self._connection.request("GET", f"/v1/snapshots/{snapshot}/record")

    def blob(self, name: str) -> bytes:
        """A blob's content, as the service has it."""
        return self._connection.request("GET", f"/v1/blobs/{name}")


@dataclass(slots=True)
class Pulled:
    """What `pull` moved: blobs and bytes that had not been here, and answers that were not what their hash says."""

    snapshot: Snapshot
    blobs: int
    bytes: int
    refused: int


def pull(store: Store, snapshot: str, peers: Sequence[Peer]) -> Pulled:
    """Have a snapshot in `store`, fetching what it lacks from peers, in order, until one has it.

    Raises:
        NoSuchSandbox: no peer has the snapshot.
        SandboxError: a piece is with none of them whole; nothing was published.
        StoreFull: it does not fit.
    """
    if store.snapshot_path(snapshot).exists() and not store.missing(snapshot):
        return Pulled(store.snapshot(snapshot), 0, 0, 0)
    pulled = Pulled(None, 0, 0, 0)  # type: ignore[arg-type]
    fetch = _fetcher(snapshot, peers, pulled)
    pulled.snapshot = _first(snapshot, peers, lambda record: store.import_snapshot(record, fetch))
    return pulled


def arrive(store: Store, snapshot: str, peers: Sequence[Peer]) -> Arrival:
    """Begin to use a snapshot that only peers have: a machine runs before all of it is here (`arrival.py`).

    Raises:
        NoSuchSandbox: no peer has the snapshot.
        SandboxError: what describes it is with none of them whole.
    """
    fetch = _fetcher(snapshot, peers, Pulled(None, 0, 0, 0))  # type: ignore[arg-type]
    return _first(snapshot, peers, lambda record: Arrival.begin(store, record, fetch))


def _fetcher(snapshot: str, peers: Sequence[Peer], pulled: Pulled) -> Callable[[str], bytes]:
    """Fetches a blob from the first peer that has it whole."""

    def fetch(name: str) -> bytes:
        failures = []
        for peer in peers:
            try:
                data = peer.blob(name)
            except SandboxError as error:
                failures.append(str(error))
                continue
            if is_named(name, data):
                pulled.blobs += 1
                pulled.bytes += len(data)
                return data
            pulled.refused += 1
            failures.append("its content has another hash")
            log.warning("blob %s: a peer's content has another hash", name)
        raise SandboxError(
            f"snapshot {snapshot}: blob {name} is with none of {len(peers)} peers: {'; '.join(failures[:3])}"
        )

    return fetch


def _first(snapshot: str, peers: Sequence[Peer], take: Callable[[bytes], T]) -> T:
    """What comes of the record of the first peer that has the snapshot."""
    failures = []
    for peer in peers:
        try:
            return take(peer.record(snapshot))
        except NoSuchSandbox as error:
            failures.append(str(error))
    raise NoSuchSandbox(f"snapshot {snapshot} is with none of {len(peers)} peers: {'; '.join(failures[:3])}")
