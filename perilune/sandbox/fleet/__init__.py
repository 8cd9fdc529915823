"""Sandboxes on several machines: a pool on each, tied together by Ray (extra `ray`); snapshots move between them by hash."""

from __future__ import annotations

from perilune.sandbox.fleet.fleet import Fleet, FleetSandbox
from perilune.sandbox.fleet.transfer import HttpPeer, Peer, arrive, pull

__all__ = ["Fleet", "FleetSandbox", "HttpPeer", "Peer", "arrive", "pull"]
