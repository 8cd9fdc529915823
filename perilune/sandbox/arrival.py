"""A snapshot of a machine that is used while most of it is still on its way from another store.

What is touched is fetched first, the rest behind it, each piece by its hash. The snapshot counts as one of this store's once all of it is
here; until then nothing is collected in the store, and where a piece can be had from nobody, whoever uses the snapshot is told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from perilune.errors import SandboxError
from perilune.sandbox.store import Snapshot, Store, parse_record

Fetch = Callable[[str], bytes]


class Arrival:
    """A snapshot on its way; `Arrival.begin` starts it.

    Attributes:
        snapshot: its record.
        fetched: blobs that came from elsewhere so far.
    """

    _under_way: ClassVar[dict[tuple[Path, str], Arrival]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, store: Store, snapshot: Snapshot, fetch: Fetch) -> None:
        self.store, self.snapshot, self.fetched = store, snapshot, 0
        self._fetch = fetch
        self._held = contextlib.ExitStack()
        self._batch = self._held.enter_context(store.writing())
        self._changed = threading.Condition()
        self._coming: set[str] = set()
        self._here: set[str] = set()
        self._failure: SandboxError | None = None
        self._ended = threading.Event()

    @classmethod
    def begin(cls, store: Store, record: bytes, fetch: Fetch) -> Arrival:
        """Fetch what describes a snapshot, then the rest in a thread of its own.

        Args:
            record: from the other store's `export`.
            fetch: gives the content of a blob by its name, from several threads at once.

        Raises:
            StoreDamaged: the record or a blob is not what its hash says.
            SandboxError: as `fetch`.
        """
        arrival = cls(store, parse_record(record, "a record that was sent here"), fetch)
        key = (store.root.resolve(), arrival.snapshot.id)
        with cls._guard:
            if (other := cls._under_way.get(key)) is not None and other._failure is None:
                arrival._held.close()
                return other
            cls._under_way[key] = arrival
        try:
            arrival.have(arrival.snapshot.layer)
            names = sorted(store.needs(arrival.snapshot))
        except BaseException:
            arrival._end()
            raise
        threading.Thread(
            target=arrival._finish, args=(names,), name=f"arrival of {arrival.snapshot.id}", daemon=True
        ).start()
        if arrival.snapshot.contains != "machine":
            arrival.wait()  # Files are written when the sandbox is made, all of them.
        return arrival

    @classmethod
    def of(cls, root: Path, *, snapshot: str = "", layer: str = "") -> Arrival | None:
        """One that is under way into the store of this folder, by its snapshot or its layer."""
        root = root.resolve()
        with cls._guard:
            for (where, name), arrival in cls._under_way.items():
                wanted = name == snapshot or arrival.snapshot.layer == layer
                if where == root and wanted and arrival._failure is None:
                    return arrival
        return None

    def have(self, name: str) -> None:
        """Return once a blob is in the store. Raises SandboxError if nobody has it whole."""
        with self._changed:
            while name in self._coming:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if name in self._here or self.store.blob_path(name).exists():
                return
            self._coming.add(name)
        try:
            self.store.fetch(name, self._batch, self._fetch)
            self.fetched += 1
            self._here.add(name)
        except Exception as error:
            self._failure = _typed(error)
            raise self._failure from error
        finally:
            with self._changed:
                self._coming.discard(name)
                self._changed.notify_all()

    def wait(self) -> None:
        """Return once all of it is here and published. Raises SandboxError if that will not be."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def _finish(self, names: list[str]) -> None:
        try:
            for name in names:
                self.have(name)
            self._batch.publish(self.snapshot)
        except Exception as error:
            self._failure = _typed(error)
        finally:
            self._end()

    def _end(self) -> None:
        with self._guard:
            key = (self.store.root.resolve(), self.snapshot.id)
            if self._under_way.get(key) is self:  # One that failed may have been followed by another try.
                del self._under_way[key]
        self._held.close()
        self._ended.set()


def _typed(error: Exception) -> SandboxError:
    """Whatever went wrong on the way, as what users of a sandbox expect."""
    return error if isinstance(error, SandboxError) else SandboxError(f"a piece cannot be fetched: {error}")
