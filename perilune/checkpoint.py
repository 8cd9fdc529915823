"""Checkpoints: sharded safetensors and one JSON index, whole or not there at all.

    checkpoints/step-00000120/
      model-00001-of-00002.safetensors        parameters and the routers' selection biases
      optimizer-00001-of-00001.safetensors    momenta, and the generators' states under `rng.*`
      state.json                              format, step, size and sha256 of each file, every tensor's shape and dtype,
                                              and what else the next step depends on (loader, tokens, vocabulary …)

A save writes into a hidden temporary folder, syncs each file and the folder, and gives it its name by one rename: a
process killed at any moment, or a full disk, leaves the earlier checkpoints as they were and at most a hidden folder,
which the next run removes. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from perilune.errors import CheckpointError
from perilune.rundir import RunDir, disk_errors, incomplete, sync_directory

FORMAT, VERSION = "perilune-checkpoint", 1
SHARD_BYTES = 2 << 30
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


# -- writing --------------------------------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, row-major, on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write one synced safetensors file tensor by tensor, hashing on the way; no second copy of the data is held.

    Returns:
        `{"bytes", "sha256"}` of the file.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())):
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def _shards(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Cut in order into groups of at most `limit` bytes (a larger tensor gets its own)."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def save(
    run: RunDir,
    step: int,
    *,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
    keep: int = 2,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the checkpoint after `step` optimizer steps, then drop all but the newest `keep`.

    Args:
        run: where.
        step: optimizer steps done.
        model: `state_dict()` of the model.
        optimizer: the optimizer's tensors and generator states.
        state: plain JSON values that the next step depends on.
        keep: whole checkpoints that stay.
        shard_bytes: largest file.

    Returns:
        The checkpoint's folder.

    Raises:
        CapacityError: the disk is full; what was saved before is untouched.
    """
    final = run.checkpoint_path(step)
    temporary = run.checkpoints_path / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with disk_errors(final):
        try:
            temporary.mkdir(parents=True)
            files: dict[str, Any] = {}
            tensors: dict[str, Any] = {}
            for kind, named in (("model", model), ("optimizer", optimizer)):
                shards = _shards(named, shard_bytes)
                tensors[kind] = {}
                for number, shard in enumerate(shards, 1):
                    file = f"{kind}-{number:05d}-of-{len(shards):05d}.safetensors"
                    files[file] = write_safetensors(temporary / file, shard)
                    tensors[kind] |= {
                        n: {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "file": file} for n, t in shard.items()
                    }
            index = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "files": files,
                "tensors": tensors,
                "state": state,
            }
            with (temporary / "state.json").open("w", encoding="utf-8") as out:
                json.dump(index, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
            sync_directory(temporary)
            _discard(final)
            temporary.rename(final)
            sync_directory(run.checkpoints_path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    for _, old in run.checkpoints()[:-keep]:
        _discard(old)
    return final


def _discard(folder: Path) -> None:
    """Remove a checkpoint so that a kill half-way never leaves a named folder with files missing."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def clean(run: RunDir) -> list[Path]:
    """Remove what killed saves left behind; returns the removed folders. Only for the run's one writer."""
    if not run.checkpoints_path.is_dir():
        return []
    stale = [p for p in run.checkpoints_path.iterdir() if p.name.startswith(".step-") and p.is_dir()]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


# -- reading --------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> dict[str, Any]:
    """The checkpoint's state.json.

    Raises:
        CheckpointError: it is missing, unreadable, or not written by this program.
    """
    path = folder / "state.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: cannot read state.json ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise CheckpointError(f"{folder} is not a checkpoint of this program: format {found!r} instead of {FORMAT!r}")
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has format version {index.get('version')}; this program reads version {VERSION}"
        )
    kinds = {"step": int, "files": dict, "tensors": dict, "state": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(index.get(key), kind)]
    if wrong or not isinstance(index["tensors"].get("model"), dict):
        raise CheckpointError(f"{path} is damaged: it does not say its {', '.join(wrong) or 'tensors'}")
    return index


def problems(folder: Path) -> list[str]:
    """Everything that is wrong with the files of a checkpoint: missing, cut, or with other content; empty if whole."""
    found = incomplete(folder)
    if found:
        return found
    for name, entry in read_index(folder)["files"].items():
        with (folder / name).open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != entry["sha256"]:
            found.append(f"{name} has sha256 {actual[:12]}… instead of {entry['sha256'][:12]}…")
    return found


def verified(folder: Path) -> dict[str, Any]:
    """Index of a checkpoint whose files were all found whole.

    Raises:
        CheckpointError: it is no checkpoint, or damaged; the message says which file and how.
    """
    index = read_index(folder)
    wrong = problems(folder)
    if wrong:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}; use another step or an intact copy")
    return index


def newest(run: RunDir) -> tuple[Path | None, list[str]]:
    """The last checkpoint whose files are whole by size and hash, and why each newer one was refused."""
    refused = []
    folders = sorted(run.checkpoints_path.glob("step-*"), reverse=True) if run.checkpoints_path.is_dir() else []
    for folder in folders:
        try:
            verified(folder)
            return folder, refused
        except CheckpointError as error:
            refused.append(str(error))
    return None, refused


def read_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """Tensors of `kind` ("model" or "optimizer") on the CPU; checks sizes and names, not hashes (see `verified`).

    Raises:
        CheckpointError: a file is missing, cut or unreadable, or does not hold what the index says.
    """
    index = read_index(folder)
    wrong = incomplete(folder)
    if wrong:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}; use another step or an intact copy")
    expected = index["tensors"][kind]
    tensors: dict[str, Tensor] = {}
    for name in sorted({entry["file"] for entry in expected.values()}):
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder / name} is not a readable safetensors file: {error}") from error
    wanted = {name: tuple(entry["shape"]) for name, entry in expected.items()}
    wrong = differences(wanted, {name: tuple(t.shape) for name, t in tensors.items()}, "index", "files")
    if wrong:
        raise CheckpointError(f"checkpoint {folder} contradicts its index: {wrong}")
    return tensors


def differences(
    wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], wanted_in: str, found_in: str, limit: int = 4
) -> str:
    """Say in words how two tables of names and shapes differ; empty if they do not."""

    def some(names: Iterable[str]) -> str:
        ordered = sorted(names)
        more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
        return ", ".join(ordered[:limit]) + more

    parts = []
    if only := set(wanted) - set(found):
        parts.append(f"only in the {wanted_in}: {some(only)}")
    if only := set(found) - set(wanted):
        parts.append(f"only in the {found_in}: {some(only)}")
    other = [n for n in wanted if n in found and wanted[n] != found[n]]
    if other:
        shown = [f"{n} {list(wanted[n])} in the {wanted_in}, {list(found[n])} in the {found_in}" for n in other[:limit]]
        parts.append("; ".join(shown) + (f"; and {len(other) - limit} more" if len(other) > limit else ""))
    return "; ".join(parts)


def load_model(folder: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights and buffers into `model`.

    Raises:
        CheckpointError: the checkpoint is of another model; the message says what differs, the vocabulary first.
    """
    tensors = read_tensors(folder, "model")
    own = model.state_dict()
    wanted = {name: tuple(t.shape) for name, t in own.items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    wrong = differences(wanted, found, "model", "checkpoint")
    if wrong:
        rows = [table["embed.weight"][0] for table in (wanted, found) if "embed.weight" in table]
        lead = ""
        if len(rows) == 2 and rows[0] != rows[1]:
            lead = f"its vocabulary has {rows[1]} tokens, the model's {rows[0]}; "
        raise CheckpointError(f"checkpoint {folder} does not fit the model: {lead}{wrong}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
