"""What ties a step of an agent's trajectory together: files, events, tokens, weights. Resuming refuses anything that differs.

    trajectories/NAME/events.jsonl        tool results in order, each with the hash of all up to it
    trajectories/NAME/step-%06d.json      one `StepManifest` a step, written last

The order of a step: the tool has finished → its result is appended → the sandbox is saved → the manifest is published. A process that
is killed in between leaves the step before as the newest whole one; what was appended after it is dropped and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox.client import Sandbox
from perilune.sandbox.home import sync_folder
from perilune.sandbox.protocol import Mismatch, StoreDamaged
from perilune.sandbox.removal import needed
from perilune.sandbox.sandboxes import Sandboxes

_STEP = re.compile(r"step-(\d{6,})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What produces a trajectory's tokens, besides its prefix.

    Attributes:
        weights: version of the policy's weights.
        quantisation: hash of how they are quantised.
        template: hash of the chat template.
        harness: hash of the agent's loop and tools.
    """

    weights: str
    quantisation: str
    template: str
    harness: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepManifest:
    """One step of a trajectory.

    Attributes:
        trajectory, step: which; steps count from 0.
        environment: snapshot of the sandbox after the step's tool.
        event_hash: of all tool results up to this step.
        token_prefix_hash: of all token ids of the prefix that shows them, from `hash_tokens`.
        weights, quantisation, template, harness: see `Versions`.
        kv_checkpoint: the server's state of the prefix; None = it is prefilled again.
        parent: the step before, or None; of a fork, "TRAJECTORY/STEP" that it left.
    """

    trajectory: str
    step: int
    environment: str
    event_hash: str
    token_prefix_hash: str
    weights: str
    quantisation: str
    template: str
    harness: str
    kv_checkpoint: str | None
    parent: str | None


def hash_tokens(ids: Iterable[int]) -> str:
    """Hash of a token prefix."""
    state = hashlib.blake2b(digest_size=16)
    for number in ids:
        state.update(int(number).to_bytes(8, "little"))
    return state.hexdigest()


def hash_events(events: Iterable[Any]) -> str:
    """Hash of tool results in order; each is a JSON value."""
    chain = ""
    for event in events:
        chain = _chained(chain, event)
    return chain


def _chained(before: str, event: Any) -> str:
    return hashlib.blake2b(f"{before}\0{json.dumps(event, sort_keys=True)}".encode(), digest_size=16).hexdigest()


class TrajectoryLog:
    """Events and manifests of one trajectory, in the sandboxes' folder.

    Args:
        sandboxes: where its snapshots are.
        name: of the trajectory.

    Attributes:
        events: the tool results up to the newest whole step.
        dropped: events that were appended after it by a process that was killed.
    """

    def __init__(self, sandboxes: Sandboxes, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ConfigError(f"trajectory {name!r} must be letters, digits, '.', '_', '-'")
        self.sandboxes, self.name = sandboxes, name
        self.folder = sandboxes.home.trajectories_folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        newest = self.latest()
        count = 0 if newest is None else newest.step + 1
        stored = self._stored_events()
        self.events = stored[:count]
        if newest is not None and hash_events(self.events) != newest.event_hash:
            raise StoreDamaged(
                f"trajectory {name}: events.jsonl does not hold the {count} events of step {newest.step}"
            )
        self.dropped = len(stored) - len(self.events)
        self._chain = "" if newest is None else newest.event_hash
        if self._file_size() != self._size(count):
            self._rewrite()

    def _events_path(self) -> Path:
        return self.folder / "events.jsonl"

    def _file_size(self) -> int:
        return self._events_path().stat().st_size if self._events_path().exists() else 0

    def _size(self, count: int) -> int:
        return sum(len(_line(event)) for event in self.events[:count])

    def _stored_events(self) -> list[Any]:
        found = []
        with contextlib.suppress(FileNotFoundError, ValueError):
            for line in self._events_path().read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break  # Torn by a kill.
                found.append(json.loads(line))
        return found

    def _rewrite(self) -> None:
        _write_whole(self._events_path(), b"".join(_line(event) for event in self.events))

    def steps(self) -> list[int]:
        """Steps that have a manifest."""
        matches = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def manifest(self, step: int) -> StepManifest:
        """A step's manifest. Raises SandboxError if there is none, StoreDamaged if it is not whole."""
        path = self.folder / f"step-{step:06d}.json"
        try:
            body, checksum, rest = path.read_bytes().split(b"\n")
            if rest or hashlib.blake2b(body, digest_size=16).hexdigest() != checksum.decode():
                raise ValueError("its checksum does not fit")
            return StepManifest(**json.loads(body))
        except FileNotFoundError:
            raise SandboxError(f"trajectory {self.name} has no step {step}; it has {self.steps() or 'none'}") from None
        except (ValueError, TypeError) as error:
            raise StoreDamaged(f"manifest {path} is damaged: {error}") from None

    def latest(self) -> StepManifest | None:
        """The newest step, or None before the first."""
        steps = self.steps()
        return self.manifest(steps[-1]) if steps else None

    def record(
        self,
        sandbox: Sandbox,
        event: Any,
        tokens: Iterable[int],
        versions: Versions,
        *,
        kv_checkpoint: str | None = None,
    ) -> StepManifest:
        """Save a finished tool step.

        Args:
            sandbox: running; it is saved as it stands.
            event: the tool's result, a JSON value.
            tokens: ids of the whole prefix that shows it.
            versions: what the tokens come from.

        Raises:
            SandboxError: the sandbox could not be saved; the step does not exist then.
        """
        newest = self.latest()
        chain = _chained(self._chain, event)
        with open(self._events_path(), "ab") as file:
            begun = file.tell()
            file.write(_line(event))
            file.flush()
            os.fsync(file.fileno())
        try:
            snapshot = sandbox.checkpoint()
            manifest = StepManifest(
                trajectory=self.name, step=len(self.events), environment=snapshot.id, event_hash=chain,
                token_prefix_hash=hash_tokens(tokens), kv_checkpoint=kv_checkpoint,
                parent=None if newest is None else f"{self.name}/{newest.step}", **asdict(versions),
            )  # fmt: skip
            body = json.dumps(asdict(manifest), sort_keys=True).encode()
            text = body + b"\n" + hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b"\n"
            _write_whole(self.folder / f"step-{manifest.step:06d}.json", text)
        except BaseException:
            os.truncate(self._events_path(), begun)
            raise
        self.events.append(event)
        self._chain = chain
        return manifest

    def resume(
        self,
        events: Sequence[Any],
        tokens: Iterable[int],
        versions: Versions,
        *,
        kv_checkpoint: str | None = None,
        step: int | None = None,
    ) -> Sandbox:
        """A sandbox as it was after a step, if everything that is to go on with it belongs to that step.

        Args:
            events: the tool results that the prefix shows.
            tokens: ids of the prefix.
            versions: what will produce the next tokens.
            kv_checkpoint: server's state that will be used, or None to prefill again.
            step: None = the newest.

        Raises:
            Mismatch: names the first field that differs; nothing was started.
            StoreDamaged, SandboxError: the snapshot is damaged or gone.
        """
        manifest = self.latest() if step is None else self.manifest(step)
        if manifest is None:
            raise SandboxError(f"trajectory {self.name} has no step to resume")
        wanted: dict[str, Any] = {
            "trajectory": self.name, "event_hash": hash_events(events), "token_prefix_hash": hash_tokens(tokens), **asdict(versions),
        }  # fmt: skip
        if kv_checkpoint is not None:
            wanted["kv_checkpoint"] = kv_checkpoint
        for name in (field.name for field in fields(StepManifest)):
            if name in wanted and getattr(manifest, name) != wanted[name]:
                raise Mismatch(
                    name, getattr(manifest, name), wanted[name], f"step {manifest.step} of trajectory {self.name}"
                )
        return self.sandboxes.resume(manifest.environment)

    def prune(self, keep: int) -> int:
        """Remove all but the newest `keep` steps with those of their snapshots that nothing else needs; returns the bytes freed."""
        old = self.steps()[: -keep or None]
        names = [self.manifest(step).environment for step in old]
        for step in old:
            (self.folder / f"step-{step:06d}.json").unlink()
        store, others = self.sandboxes.home.store, needed(self.sandboxes.home)
        return store.delete([name for name in names if name not in others and store.snapshot_path(name).exists()])


def _line(event: Any) -> bytes:
    return json.dumps(event, sort_keys=True).encode() + b"\n"


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
