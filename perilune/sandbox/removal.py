"""Removing sandboxes, snapshots and trajectories by name: all that are named or none, and nothing that another one still needs."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perilune.errors import SandboxError
from perilune.sandbox.home import Home, Record
from perilune.sandbox.protocol import NoSuchSandbox, State

if TYPE_CHECKING:
    from perilune.sandbox.sandboxes import Sandboxes


def needed(home: Home, removed: Sequence[str] = ()) -> dict[str, str]:
    """Snapshots that a paused sandbox or a trajectory's step cannot do without -> what to do about it.

    Args:
        removed: ids of sandboxes and names of trajectories that shall not count.
    """
    found = {}
    for record in home.records():
        if record.state == State.PAUSED.value and record.snapshot is not None and record.id not in removed:
            found[record.snapshot] = (
                f"is all that there is of the paused sandbox {record.name}; remove that one (perilune sandbox rm {record.name}), "
                "which frees its snapshot, too"
            )
    for name in trajectories(home):
        for step, snapshot in steps(home, name).items() if name not in removed else ():
            found[snapshot] = (
                f"belongs to {step} of trajectory {name}; remove the trajectory (perilune sandbox rm {name}), or its old steps "
                "(TrajectoryLog.prune)"
            )
    return found


def check_unneeded(home: Home, snapshots: Sequence[str], removed: Sequence[str] = ()) -> None:
    """Raise SandboxError for a snapshot that is `needed`."""
    kept = needed(home, removed)
    for name in snapshots:
        if name in kept:
            raise SandboxError(f"snapshot {name} {kept[name]}")


def trajectories(home: Home) -> list[str]:
    """Names of the trajectories that have a folder in `home`."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in home.trajectories_folder.iterdir() if path.is_dir())
    return []


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
    logs = []
    for name in names:
        if name.startswith("snap-"):
            continue
        if name in trajectories(home) and not any(name in (one.name, one.id) for one in home.records()):
            logs.append(name)
            continue
        record = home.find(name)
        if home.is_live(record.id):
            raise SandboxError(f"sandbox {record.name} is in use by process {record.pid}; end that process first")
        records[record.id] = record
    check_unneeded(home, snapshots, [*records, *logs])
    for record in records.values():
        home.remove(record.id)
    theirs = [record.snapshot for record in records.values() if record.snapshot is not None]
    for name in logs:
        theirs += steps(home, name).values()
        shutil.rmtree(home.trajectories_folder / name)
    kept = needed(home)
    gone = dict.fromkeys((*snapshots, *(name for name in theirs if name not in kept)))
    return store.delete([name for name in gone if store.snapshot_path(name).exists()])
