"""`perilune sandbox`: the commands that list, copy, save and remove; here, or at a service."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from perilune.cli.sandbox_open import said_if_slow
from perilune.errors import ConfigError, SandboxError

WATCH_SECONDS = 1.0


def one_name(flags: argparse.Namespace, command: str) -> str:
    """The one name or snapshot that a command needs. Raises ConfigError."""
    if len(flags.names) != 1:
        raise ConfigError(f"sandbox {command} needs one name or snapshot; given: {' '.join(flags.names) or 'nothing'}")
    return flags.names[0]


def ps(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    """What there is; with --watch until interrupted."""
    while True:
        listed = _listed(sandboxes, flags)
        if flags.json:
            print(json.dumps(listed), flush=True)
        else:
            if flags.watch and sys.stdout.isatty():
                print("\x1b[H\x1b[J", end="")
            print(_table(listed), flush=True)
        if not flags.watch:
            return 0
        time.sleep(WATCH_SECONDS)


def _listed(sandboxes: Any, flags: argparse.Namespace) -> dict[str, Any]:
    if flags.url:
        usage = sandboxes.usage()
        return {"sandboxes": sandboxes.records(), "snapshots": sandboxes.saved(), "store_bytes": usage["store_bytes"],
                "reaped": 0, "usage": usage, "where": flags.url}  # fmt: skip
    reaped = sandboxes.home.reap()
    if reaped and not flags.json:
        print(f"removed {reaped} sandboxes whose process was killed", file=sys.stderr)
    names = ("name", "id", "driver", "state", "snapshot", "created", "pid")
    records = [{name: getattr(record, name) for name in names} for record in sandboxes.home.records()]
    store = sandboxes.home.store
    return {"sandboxes": records, "snapshots": sandboxes.saved(), "trajectories": _trajectories(sandboxes.home),
            "store_bytes": store.used_bytes(), "reaped": reaped, "where": str(store.root)}  # fmt: skip


def _trajectories(home: Any) -> list[dict[str, Any]]:
    from perilune.sandbox.removal import steps, trajectories

    found = []
    for name in trajectories(home):
        made = steps(home, name)
        found.append({"name": name, "steps": len(made), "snapshot": list(made.values())[-1] if made else None})
    return found


def _table(listed: dict[str, Any]) -> str:
    there = "usage" in listed
    lines = [f"{'SANDBOX':<24}{'DRIVER':<13}{'STATE':<10}{'AGE':>7}{'MEMORY':>11}  SNAPSHOT"]
    for record in listed["sandboxes"]:
        held = f"{record['memory_bytes'] / 2**20:.1f} MiB" if record.get("memory_bytes") else ""
        lines.append(
            f"{record['name']:<24}{record['driver']:<13}{record['state']:<10}{_age(record['created']):>7}{held:>11}  {record['snapshot'] or ''}"
        )
    names = {record["id"]: record["name"] for record in listed["sandboxes"]}
    lines.append(f"\n{'SNAPSHOT':<24}{'OF':<24}{'HOLDS':<9}{'ENTRIES':>8}{'BYTES':>15}{'AGE':>7}")
    for entry in listed["snapshots"]:
        if "damaged" in entry:
            lines.append(f"{entry['id']:<24}{entry['damaged']}")
        else:
            lines.append(
                f"{entry['id']:<24}{names.get(entry['sandbox'], entry['sandbox']):<24}{entry['contains']:<9}{entry['entries']:>8}{entry['bytes']:>15,}{_age(entry['created']):>7}"
            )
    if listed.get("trajectories"):
        lines.append(f"\n{'TRAJECTORY':<24}{'STEPS':>5}  NEWEST")
        for entry in listed["trajectories"]:
            lines.append(f"{entry['name']:<24}{entry['steps']:>5}  {entry['snapshot'] or ''}")
    lines.append(f"\nstore: {listed['store_bytes']:,} bytes in {listed['where']}")
    if there:
        usage = listed["usage"]
        held = usage["memory"]["pss"] + usage["memory"]["files"]
        overcommit = f" ({usage['overcommit']:.1f}x)" if held else ""
        lines.append(
            f"memory: {held / 2**20:.0f} MiB held of {usage['allowed_bytes'] / 2**20:.0f} allowed, "
            f"{usage['promised_bytes'] / 2**20:.0f} promised{overcommit}; {usage['held']} with a machine, "
            f"{usage['paused']} paused, {usage['warm']} warm"
        )
    return "\n".join(lines)


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def _saved_state(sandboxes: Any, name: str) -> str:
    """The snapshot that a name stands for: itself, or the newest one of a paused sandbox."""
    if name.startswith("snap-"):
        return name
    record = sandboxes.home.find(name)
    if record.state != "paused" or record.snapshot is None:
        raise SandboxError(f"sandbox {name} is {record.state}; only a paused one has a saved state")
    return record.snapshot


def snapshot(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    name = one_name(flags, "snapshot")
    if flags.url:
        box = sandboxes.open(name)
        made = box.snapshot if box.state.value == "paused" else box.checkpoint().id
        print(json.dumps({"id": made}) if flags.json else made)
        return 0
    store = sandboxes.home.store
    made = store.copy(store.snapshot(_saved_state(sandboxes, name)))
    print(json.dumps(asdict(made)) if flags.json else made.id)
    return 0


def fork(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    from perilune.sandbox.client import MOST_FORKS

    if not 1 <= flags.count <= MOST_FORKS:
        raise ConfigError(f"-n {flags.count}: 1 to {MOST_FORKS} copies at once")
    source = one_name(flags, "fork")
    if flags.url:
        return _fork_there(sandboxes, flags, source)
    snapshot = _saved_state(sandboxes, source)
    prefix = flags.name or (None if source.startswith("snap-") else source)
    names = [None] * flags.count if prefix is None else sandboxes.home.free_names(prefix, flags.count)
    made: list[Any] = []
    try:
        for name in names:
            made.append(sandboxes.shelve(snapshot, name=name))
    except BaseException:
        sandboxes.remove([record.id for record in made])  # All or none.
        raise
    if flags.json:
        print(
            json.dumps(
                {"sandboxes": [{"name": record.name, "id": record.id, "snapshot": record.snapshot} for record in made]}
            )
        )
    else:
        print("\n".join(record.name for record in made))
    return 0


def _fork_there(sandboxes: Any, flags: argparse.Namespace, source: str) -> int:
    if source.startswith("snap-"):
        # The service finds free names only for the copies of a sandbox.
        first = sandboxes.resume(source, name=f"{flags.name}-1" if flags.name else None)
        made = [first, *(first.fork(flags.count - 1, name=flags.name) if flags.count > 1 else ())]
    else:
        made = sandboxes.open(source).fork(flags.count, name=flags.name or source)
    if flags.json:
        print(json.dumps({"sandboxes": [{"name": box.name, "id": box.id, "snapshot": box.snapshot} for box in made]}))
    else:
        print("\n".join(box.name for box in made))
    return 0


def pause(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    """Save a sandbox of a service and end its processes; one that is kept here is paused between commands anyway."""
    from perilune.sandbox.protocol import TransitionError

    name = one_name(flags, "pause")
    if flags.url:
        box = sandboxes.open(name)
        try:
            box.pause()
        except TransitionError:
            if box.state.value != "paused":
                raise
        snapshot = box.snapshot
    else:
        record = sandboxes.home.find(name)
        if record.state != "paused":
            raise SandboxError(
                f"sandbox {name} is {record.state}, of process {record.pid}; one that a service has is paused with --url URL"
            )
        snapshot = record.snapshot
    print(json.dumps({"sandbox": name, "state": "paused", "snapshot": snapshot}) if flags.json else snapshot)
    return 0


def rm(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if flags.url:
        names = [*flags.names, *(row["name"] for row in sandboxes.records() if flags.lost and row["state"] == "lost")]
        return _removed(flags, names, sandboxes.remove(names))
    home = sandboxes.home
    names = [*flags.names, *(record.name for record in home.records() if flags.lost and record.state == "lost")]
    if not names and not flags.lost:
        raise ConfigError("sandbox rm needs names of sandboxes, snapshots or trajectories, or --lost")
    return _removed(flags, names, sandboxes.remove(names))


def _removed(flags: argparse.Namespace, names: list[str], freed: int) -> int:
    names = list(dict.fromkeys(names))
    print(
        json.dumps({"removed": names, "freed_bytes": freed})
        if flags.json
        else f"removed {len(names)}, freed {freed:,} bytes"
    )
    return 0


def _probe_text(probe: Any) -> str:
    lines = [f"{probe.driver}: {'works' if probe.passed else 'does not work'}: {probe.reason}"]
    lines += [f"  {'yes' if one.held else 'no ':<4}{one.name:<16}{one.how}" for one in probe.guarantees]
    if not probe.passed and probe.driver == "proc":
        lines.append("  needs user namespaces with mounts in them: kernel 5.11 or newer, kernel.unprivileged_userns_clone=1 where "
                     "there is such a setting,\n  and in a container the right to make them (docker run --privileged)")  # fmt: skip
    return "\n".join(lines)


def doctor(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    """What each driver's probe found, and whether the store is whole."""
    from perilune.sandbox.drivers import DRIVERS

    problems: list[str] = []
    probes: list[Any] = []

    def found(probe: Any) -> None:
        probes.append(probe)
        if not flags.json:
            print(_probe_text(probe), flush=True)

    if flags.url:
        with said_if_slow("the service looks at its drivers"):
            theirs = sandboxes.probes()
        for probe in theirs:
            found(probe)
        where, used = flags.url, sandboxes.usage()["store_bytes"]
    else:
        sandboxes.home.reap()
        for name in DRIVERS if flags.build else ():
            build = getattr(sandboxes.driver(name), "build", None)
            if build is not None:
                build(force=True)
        for name in DRIVERS:
            with said_if_slow(f"looking at driver {name}; a machine boots once"):
                probe = sandboxes.probe(name)
            found(probe)
        problems = sandboxes.home.store.verify()
        where, used = str(sandboxes.home.store.root), sandboxes.home.store.used_bytes()
    if flags.json:
        store = {"root": where, "bytes": used, "problems": problems}
        print(json.dumps({"drivers": [asdict(probe) for probe in probes], "store": store}))
    else:
        print(f"store: {used:,} bytes in {where}, {len(problems) or 'no'} problems")
        for problem in problems:
            print(f"  {problem}")
    # A machine need not have every mechanism; one that works is enough, and a store must be whole.
    return 0 if any(probe.passed for probe in probes) and not problems else 1
