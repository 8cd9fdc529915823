"""Removing sandboxes, snapshots and trajectories by name: all that are named or none, and nothing that another one still needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perilune.errors import SandboxError
from perilune.sandbox.home import Home, Record
from perilune.sandbox.protocol import NoSuchSandbox, State

if TYPE_CHECKING:
    from perilune.sandbox.sandboxes import Sandboxes


def check_unneeded(home: Home, snapshots: Sequence[str], removed: Sequence[str] = ()) -> None:
    """Raise SandboxError where a snapshot is the only state of a paused sandbox, or of a trajectory's step.

    Args:
        removed: ids of sandboxes and names of trajectories that go together with the snapshots.
    """
    for record in home.records():
        if record.state == State.PAUSED.value and record.snapshot in snapshots and record.id not in removed:
            raise SandboxError(
                f"snapshot {record.snapshot} is all that there is of the paused sandbox {record.name}; remove that one "
                f"(perilune sandbox rm {record.name}), which frees its snapshot, too"
            )
    for name in home.trajectories():
        for step, snapshot in steps(home, name).items():
            if snapshot in snapshots and name not in removed:
                raise SandboxError(
                    f"snapshot {snapshot} belongs to {step} of trajectory {name}; remove the trajectory "
                    f"(perilune sandbox rm {name}), or its old steps (TrajectoryLog.prune)"
                )


def steps(home: Home, trajectory: str) -> dict[str, str]:
    """The steps of a trajectory, in order, and the snapshot of each; damaged manifests are left out."""
    found = {}
    for path in sorted((home.trajectories_folder / trajectory).glob("step-*.json")):
        try:
            found[path.stem] = str(json.loads(path.read_bytes().split(b"\n")[0])["environment"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def remove(sandboxes: Sandboxes, names: Sequence[str]) -> int:
    """Remove sandboxes with their newest snapshots, snapshots, and trajectories with theirs; returns the bytes freed.

    Raises:
        NoSuchSandbox: one of the names is none; nothing was removed.
        SandboxError: one is in use, or something else needs a snapshot; nothing was removed.
    """
    home, store = sandboxes.home, sandboxes.home.store
    snapshots = [name for name in dict.fromkeys(names) if name.startswith("snap-")]
    for name in snapshots:
        if not store.snapshot_path(name).exists():
            raise NoSuchSandbox(f"there is no snapshot {name!r} in {store.root}")
    records: dict[str, Record] = {}
    trajectories = []
    for name in names:
        if name.startswith("snap-"):
            continue
        if name in home.trajectories() and not any(name in (one.name, one.id) for one in home.records()):
            trajectories.append(name)
            continue
        record = home.find(name)
        if home.is_live(record.id):
            raise SandboxError(f"sandbox {record.name} is in use by process {record.pid}; end that process first")
        records[record.id] = record
    check_unneeded(home, snapshots, [*records, *trajectories])
    for record in records.values():
        home.remove(record.id)
    for name in trajectories:
        snapshots += steps(home, name).values()
        home.remove_trajectory(name)
    snapshots += [record.snapshot for record in records.values() if record.snapshot is not None]
    return store.delete([name for name in dict.fromkeys(snapshots) if store.snapshot_path(name).exists()])
