"""A run folder: the truth about a training run, in files that anything can read.

    runs/NAME/
      config.toml        resolved TrainConfig, its sha256 in the first line
      environment.json   versions, device, threads
      metrics.jsonl      one JSON record a line; appended while training
      tokenizer.json     the tokenizer of this run
      split.json         what was held out
      probes/            step-%08d.npz, the model's inside
      checkpoints/       step-%08d/, see `checkpoint.py`
      summary.json       written when the run ends

Every file but the appended one is written to a temporary name, synced and renamed, so a reader sees the old content or
the new, never a part. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perilune.config.parse import from_dict, load_toml, to_toml
from perilune.config.train import TrainConfig
from perilune.errors import CapacityError, CheckpointError, ConfigError

RUNS = Path("runs")
_STEP = re.compile(r"step-(\d{8,})$")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space" from the system into a `CapacityError` that names the file; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CapacityError(
            f"no disk space left for {path} ({error.strerror}); everything saved before is untouched; "
            "free some space and run the command again, a training run that had begun with --resume"
        ) from error


def sync_directory(path: Path) -> None:
    """Make renames and new names inside `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` so that `path` holds either its old content or all of the new one, also after a power cut.

    A device or pipe, such as /dev/stdout, is written to: a rename would put a file in its place.

    Raises:
        CapacityError: the disk is full; the old file is untouched and the temporary one removed.
    """
    if path.exists() and not path.is_file():
        with disk_errors(path):
            path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def config_hash(config: TrainConfig) -> str:
    """sha256 of the resolved configuration's text."""
    return hashlib.sha256(to_toml(config).encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


class RunDir:
    """The files of one run.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @staticmethod
    def resolve(name_or_path: str | Path) -> RunDir:
        """A bare name lives under `runs/`; anything with a separator, or a folder that holds a run, is a path.

        Raises:
            ConfigError: the name is empty, as an unset variable of a shell is.
        """
        if not str(name_or_path):
            raise ConfigError("the name of a run is empty; give a name (it lives under runs/) or the path of a folder")
        path = Path(name_or_path)
        text = str(name_or_path)
        bare = isinstance(name_or_path, str) and os.sep not in text and text not in (".", "..")
        if bare and (RUNS / path).exists():
            return RunDir(RUNS / path)
        if bare and not (path / "config.toml").is_file():
            return RunDir(RUNS / path)
        return RunDir(path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def checkpoints_path(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer_path(self) -> Path:
        """File of the run's tokenizer."""
        return self.path / "tokenizer.json"

    def exists(self) -> bool:
        """True if a run was started here."""
        return (self.path / "config.toml").is_file()

    def create(self) -> None:
        """Make the folder and its sub-folders.

        Raises:
            ConfigError: the path is a file, or cannot be made or written.
            CapacityError: the disk is full.
        """
        try:
            for folder in (self.path, self.checkpoints_path, self.path / "probes"):
                with disk_errors(folder):
                    folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {self.path} as a run folder: {error.strerror} ({error.filename}); choose another --run"
            ) from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for one writer; a killed process lets go of it by itself.

        Raises:
            ConfigError: another process trains into this folder now.
        """
        import fcntl

        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"another process is writing to the run {self.path}; wait for it, stop it, or choose another --run"
                ) from None
            yield

    # -- configuration and small files ------------------------------------------------------------------------------

    def write_config(self, config: TrainConfig) -> None:
        """Write the resolved configuration with its hash."""
        text = f"# sha256 {config_hash(config)}\n{to_toml(config)}"
        write_atomic(self.path / "config.toml", text.encode())

    def read_config(self) -> TrainConfig:
        """The run's configuration.

        Raises:
            CheckpointError: no run in this folder.
            ConfigError: the file was damaged or written by a version with other settings.
        """
        if not self.exists():
            known = sorted(p.parent.name for p in RUNS.glob("*/config.toml"))
            hint = f"; runs here: {', '.join(known)}" if known else ""
            raise CheckpointError(f"no run in {self.path} (it has no config.toml){hint}")
        return from_dict(TrainConfig, load_toml(self.path / "config.toml"))

    def write_json(self, name: str, value: Any) -> Path:
        """Write `value` as JSON to the file `name` (relative to the folder); NaN and infinity become null."""
        path = self.path / name
        write_atomic(path, (json.dumps(_jsonable(value), indent=2) + "\n").encode())
        return path

    def read_json(self, name: str) -> Any:
        """Read the JSON file `name`.

        Raises:
            CheckpointError: it is missing or not JSON.
        """
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error

    # -- metrics ----------------------------------------------------------------------------------------------------

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl.

        Raises:
            CapacityError: the disk is full.
        """
        path = self.path / "metrics.jsonl"
        with disk_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_jsonable(record)) + "\n")

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Records in order, of one `kind` or all; a last line that was cut short is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and (kind is None or record.get("kind") == kind):
                    records.append(record)
        return records

    def truncate_metrics(self, step: int) -> None:
        """Drop records after `step`: a resumed run writes them again."""
        kept = [record for record in self.read_metrics() if record.get("step", 0) <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomic(self.path / "metrics.jsonl", text.encode())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint_path(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints_path / f"step-{step:08d}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every whole checkpoint, oldest first.

        A folder gets its name by a rename after all of it was written, so a named one is whole unless someone damaged it;
        here its index must be readable and its files present at their full size (`checkpoint.problems` also hashes).
        """
        if not self.checkpoints_path.is_dir():
            return []
        found = []
        for folder in self.checkpoints_path.iterdir():
            match = _STEP.fullmatch(folder.name)
            if match and not incomplete(folder):
                found.append((int(match[1]), folder))
        return sorted(found)

    def latest_checkpoint(self) -> Path | None:
        """Folder of the last whole checkpoint, or None."""
        found = self.checkpoints()
        return found[-1][1] if found else None


def incomplete(folder: Path) -> list[str]:
    """What a checkpoint folder lacks, by its own index: missing or cut files; empty if whole.

    Only names and sizes are compared, so this is quick for a checkpoint of any size.
    """
    try:
        index = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = {name: int(entry["bytes"]) for name, entry in index["files"].items()}
    except OSError as error:
        return [f"state.json cannot be read: {error.strerror}"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return ["state.json is not a checkpoint index"]
    found = []
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            found.append(f"{name} is missing" if actual is None else f"{name} has {actual} bytes instead of {size}")
    return found
