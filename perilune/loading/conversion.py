"""Conversion between run folders and published checkpoints, in memory of a few tensors, resumable, whole or not there.

Everything is written into `OUT.partial`: file by file, each under a temporary name until it is synced, its size and sha256
then noted in a record. A rerun of the same conversion skips what the record has; after the last file the small documents
follow, config.json (or config.toml) at the very end, and one rename makes `OUT`. IN is only read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune import __version__
from perilune.config.published import KIMI_K3, KIMI_LINEAR
from perilune.errors import CapacityError, CheckpointError, ConfigError
from perilune.loading.documents import CHECKPOINT, SUMS, finish_native, finish_published
from perilune.loading.native import NativeSource, native_files
from perilune.model.hf import PlannedFile, PublishedSource, Source, is_published, published_files
from perilune.model.hf.shard_file import write_shard
from perilune.rundir import RunDir, sync_directory, write_atomic

NATIVE = "native"
TARGETS = {"kimi-k3": KIMI_K3, "kimi-linear": KIMI_LINEAR, NATIVE: NATIVE}
RECORD = ".convert.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did.

    Attributes:
        source, out: the folders.
        to: kimi-k3 | kimi-linear | native.
        experts: how routed experts are stored in the result: mxfp4 | bf16.
        tensors, files, bytes: of the weights that were written.
        reused_files: files of them that an earlier, interrupted conversion had finished.
        seconds: wall time.
        verified: every file of the result was read again and has the hash that it was written with.
        notes: what the user should know.
    """

    source: str
    out: str
    to: str
    experts: str
    tensors: int
    files: int
    bytes: int
    reused_files: int
    seconds: float
    verified: bool
    notes: list[str] = field(default_factory=list)


def open_source(name_or_path: str | Path, step: int | None = None) -> Source:
    """A run (name or folder), one checkpoint folder of a run, or a published checkpoint's folder.

    Raises:
        ConfigError, CheckpointError: it is none of these, or damaged.
    """
    path = Path(name_or_path)
    if path.is_dir() and (path / "state.json").exists() and path.parent.name == "checkpoints":
        number = path.name.rpartition("-")[2]
        return NativeSource(RunDir(path.parent.parent), int(number) if number.isdigit() else None)
    run = RunDir.resolve(name_or_path)
    if not run.exists() and is_published(path):
        if step is not None:
            raise ConfigError(f"{path} is a published checkpoint: it has no step {step}; leave --step out")
        return PublishedSource(path)
    return NativeSource(run, step)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    experts: str | None = None,
    step: int | None = None,
    verify: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Converted:
    """Convert a run into a published checkpoint, the other way round, or one published form into the other.

    Args:
        source: see `open_source`.
        out: the folder to make; it must not exist.
        to: kimi-k3 | kimi-linear | native; None = native from a published checkpoint, else the family of the model.
        experts: mxfp4 | bf16; None = as the source stores them. A run stores bf16 or fp32, never mxfp4.
        step: of a run, which checkpoint.
        verify: check the source's SHA256SUMS, if it has them, before, and the result's files after.
        on_progress: called with (file, bytes done, bytes in all).

    Raises:
        ConfigError: what is asked for cannot be.
        CheckpointError: the source is damaged, OUT exists, or OUT.partial is from another conversion.
        CapacityError: not enough disk space; what is finished stays and the same command goes on.
    """
    began = time.monotonic()
    given, target = open_source(source, step), Path(out)
    native_in = isinstance(given, NativeSource)
    family = given.published.family
    to = to or (next(name for name, kind in TARGETS.items() if kind == family) if native_in else NATIVE)
    _check_request(given, to, experts, native_in, target, source)
    experts = experts or given.published.experts
    if to == NATIVE:
        experts = "bf16"
    if verify and isinstance(given, PublishedSource):
        _check_sums(given.folder)
    files = {"model": published_files(given, experts)} if to != NATIVE else native_files(given)
    weights = "" if to != NATIVE else CHECKPOINT
    partial = target.with_name(target.name + ".partial")
    planned = [file for group in files.values() for file in group]
    with _space(target), _work_folder(partial):
        done, reused = _write_files(partial, weights, planned, _plan(given, files, to, experts), on_progress)
        if verify:
            _verify(partial / weights, done)
        if to == NATIVE:
            finish_native(given, partial, target, files, done, str(source))
        else:
            finish_published(given, partial, planned, done, experts)
        sync_directory(partial)
        partial.rename(target)
    sync_directory(target.resolve().parent)
    (target / RECORD).unlink(missing_ok=True)
    (target / ".lock").unlink(missing_ok=True)
    return Converted(
        source=str(source), out=str(target), to=to, experts=experts, tensors=sum(len(file.tensors) for file in planned),
        files=len(planned), bytes=sum(entry["bytes"] for entry in done.values()), reused_files=reused,
        seconds=time.monotonic() - began, verified=verify, notes=given.notes,
    )  # fmt: skip


def _check_request(
    given: Source, to: str, experts: str | None, native_in: bool, target: Path, source: str | Path
) -> None:
    if to not in TARGETS:
        raise ConfigError(f"--to {to} is not known; allowed: {', '.join(TARGETS)}")
    if experts not in (None, "mxfp4", "bf16"):
        raise ConfigError(f"--experts {experts} is not known; allowed: mxfp4, bf16")
    if to == NATIVE and native_in:
        raise ConfigError(f"{source} is native already; convert it to a published family: kimi-k3 or kimi-linear")
    if to == NATIVE and experts == "mxfp4":
        raise ConfigError(
            "a native run stores its experts in bf16; leave --experts out, or convert to a published family"
        )
    if to != NATIVE and TARGETS[to] != given.published.family:
        raise ConfigError(f"the model of {source} is of the family {given.published.family}; it cannot become {to}")
    if target == Path():
        raise ConfigError("OUT is empty or the current folder; name the folder to make")
    if target.exists():
        raise CheckpointError(f"{target} exists; choose another OUT, or remove it first")
    if not target.resolve().parent.is_dir():
        raise CheckpointError(f"{target.resolve().parent} is not a folder, so {target.name} cannot be made in it")


@contextlib.contextmanager
def _space(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise CheckpointError(f"cannot write {error.filename or target}: {error.strerror}") from error
        raise CapacityError(
            f"no disk space left for {target} ({error.strerror}); the files that are finished stay in {target}.partial: free "
            "some space and run the same command again, or remove that folder"
        ) from error


@contextlib.contextmanager
def _work_folder(partial: Path) -> Iterator[None]:
    """Make OUT.partial and hold it for one writer."""
    import fcntl

    partial.mkdir(exist_ok=True)
    with (partial / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"another process converts into {partial}; wait for it, or choose another OUT"
            ) from None
        yield


def _plan(given: Source, files: dict[str, list[PlannedFile]], to: str, experts: str) -> str:
    """Fingerprint of what is converted into what: a partial result is continued only by the same conversion."""
    table = [(f.name, t.name, t.dtype, t.shape) for group in files.values() for f in group for t in f.tensors]
    told = [__version__, given.identity(), to, experts, given.published.document, table]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _read_record(partial: Path, plan: str) -> dict[str, Any]:
    path = partial / RECORD
    if not path.exists():
        strangers = [p.name for p in partial.rglob("*") if p.is_file() and p.name != ".lock"]
        if strangers:
            raise CheckpointError(f"{partial} is not empty and not from a conversion ({strangers[0]}); remove it first")
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["plan"] == plan:
            return dict(record["done"])
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(
        f"{partial} is left over from another conversion (other source, changed files or other options); remove it, or "
        "choose another OUT"
    )


def _write_files(
    partial: Path, weights: str, planned: list[PlannedFile], plan: str,
    on_progress: Callable[[str, int, int], None] | None,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Write what the record does not have; returns name → size and hash of all files, and how many were there."""
    done = _read_record(partial, plan)
    for stale in partial.rglob("*.tmp"):
        stale.unlink()
    folder = partial / weights
    folder.mkdir(parents=True, exist_ok=True)
    for name, entry in list(done.items()):
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            del done[name]
    reused = len(done)
    write_atomic(partial / RECORD, json.dumps({"plan": plan, "done": done}).encode())
    total = sum(file.nbytes for file in planned)
    written = sum(file.nbytes for file in planned if file.name in done)
    free = shutil.disk_usage(partial).free
    if total - written > free:
        raise CapacityError(
            f"{partial} needs {total - written:,} more bytes, the disk has {free:,} free; free some space, or choose an OUT on "
            "another disk"
        )
    for file in planned:
        if file.name in done:
            continue

        def advance(count: int, name: str = file.name) -> None:
            nonlocal written
            written += count
            if on_progress is not None:
                on_progress(name, written, total)

        temporary = folder / (file.name + ".tmp")
        entry = write_shard(temporary, file.tensors, advance)
        temporary.rename(folder / file.name)
        sync_directory(folder)
        done[file.name] = entry
        write_atomic(partial / RECORD, json.dumps({"plan": plan, "done": done}).encode())
    return {file.name: done[file.name] for file in planned}, reused


def _verify(folder: Path, done: dict[str, Any]) -> None:
    """Read every file again and compare its hash with the one it was written with."""
    for name, entry in done.items():
        actual = _sha256(folder / name)
        if actual != entry["sha256"]:
            (folder / name).unlink()
            raise CheckpointError(
                f"{folder / name} was written with the sha256 {entry['sha256'][:12]}… and reads back as {actual[:12]}…: the disk "
                "or memory is faulty; the file was removed, run the same command again"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sums(folder: Path) -> None:
    """Compare a source's files with its SHA256SUMS, if there are any."""
    if not (folder / SUMS).exists():
        return
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        wanted, _, name = line.partition("  ")
        actual = _sha256(folder / name) if (folder / name).is_file() else "nothing"
        if actual != wanted:
            raise CheckpointError(
                f"{folder / name} has the sha256 {actual[:12]}… instead of {wanted[:12]}… ({SUMS}); fetch it again"
            )
