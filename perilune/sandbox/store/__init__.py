"""Snapshots and their content, in a folder."""

from perilune.sandbox.store.batch import Batch
from perilune.sandbox.store.blobs import SYNCS, Blobs, is_named
from perilune.sandbox.store.record import Snapshot, parse_record
from perilune.sandbox.store.store import Store

__all__ = ["SYNCS", "Batch", "Blobs", "Snapshot", "Store", "is_named", "parse_record"]
