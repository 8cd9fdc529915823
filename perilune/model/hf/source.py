"""A published checkpoint folder as a source of tensors: found, named, checked, and read in pieces.

What loaders of these families tolerate (architecture §2.1, §2.5), and so do we, with a note: names without `.model`, the
names that transformers gives dense layers, scales with two dimensions of size one, A_log of another length or rank, rotary
buffers, and layers beyond the last one (multi-token prediction). Anything else that is missing, too much, or of another
shape or type is an error before the first byte is converted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from perilune.config.published import PublishedConfig, load_config
from perilune.errors import CheckpointError
from perilune.model.hf import experts
from perilune.model.hf.shard_file import Entry, FileReader, read_header
from perilune.shapes.tensors import TensorSpec, checkpoint_tensors, is_k3

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LAYER = re.compile(r"\.?layers\.(\d+)\.")
SHOWN = 4


class Source(Protocol):
    """Tensors by published name, whatever they are stored in.

    Attributes:
        published: the model, how its experts are stored, and the document it came with.
        notes: what the user should know about what was read.
        side_files: files without weights that belong to the model (tokenizer, templates), by name.
    """

    published: PublishedConfig
    notes: list[str]
    side_files: dict[str, Path]

    def dtype(self, name: str) -> str:
        """Stored dtype of an unpacked tensor."""
        ...

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Elements of an unpacked tensor in order, in its stored dtype; a packed expert is decoded."""
        ...

    def codes(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """MXFP4 codes and scales of the expert matrix `name` (without suffix); encoded if it is stored otherwise."""
        ...

    def kept_scale(self, name: str) -> Tensor | None:
        """Scales that the expert matrix `name` (without suffix) is or once was stored with; None if there are none."""
        ...

    def identity(self) -> list[tuple[str, int, int]]:
        """(file, bytes, time of change) of everything that is read."""
        ...


class PublishedSource:
    """A folder with config.json and safetensors files.

    Args:
        folder: the checkpoint.

    Raises:
        ConfigError: config.json describes something else; see `config.published`.
        CheckpointError: the weights are not whole, or not those of config.json's model; the message names tensors, values
            and what to do.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        published = load_config(folder / "config.json")
        found = _collect(folder)
        self.published = _stored_heads(published, found)
        self.entries, self.packed = self._checked(found)
        form = "mxfp4" if self.packed else "bf16"
        if form != self.published.experts:
            self.notes.append(
                f"config.json says {self.published.experts} experts, the files hold {form}: the files count"
            )
        self.published = replace(self.published, experts=form)
        self._reader = FileReader()
        skip = {INDEX, "config.json", "SHA256SUMS"}
        suffixes = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".vocab", "LICENSE")
        self.side_files = {
            path.name: path for path in sorted(folder.iterdir())
            if path.is_file() and path.name.endswith(suffixes) and path.name not in skip and not path.name.startswith(".")
        }  # fmt: skip

    def _checked(self, found: dict[str, Entry]) -> tuple[dict[str, Entry], bool]:
        """The tensors under their canonical names, and whether the experts are packed."""
        cfg = self.published.model
        packed = any(name.endswith(".weight_packed") for name in found)
        wanted = {spec.name: spec for spec in checkpoint_tensors(cfg, packed_experts=packed)}
        entries: dict[str, Entry] = {}
        extra, twice, wrong = [], [], []
        skipped: Counter[str] = Counter()
        widened: Counter[str] = Counter()
        for stored, entry in found.items():
            layer = _LAYER.search(stored)
            if "rotary_emb." in stored:
                skipped["rotary buffers, which layers without positions do not use"] += 1
                continue
            if layer and int(layer[1]) >= cfg.num_layers and not stored.startswith("vision_tower."):
                skipped[f"tensors of layer {layer[1]} (the model has {cfg.num_layers}: multi-token prediction)"] += 1
                continue
            name = _canonical(stored, wanted, is_k3(cfg))
            if name is None:
                extra.append(stored)
            elif name in entries:
                twice.append(f"{name} (as {stored} too)")
            else:
                problem = _problem(wanted[name], entry)
                if problem:
                    wrong.append(f"{stored} {problem}")
                elif entry.dtype != wanted[name].dtype:
                    widened[f"{entry.dtype} instead of {wanted[name].dtype}"] += 1
                entries[name] = replace(entry, shape=wanted[name].shape)
        missing = [name for name in wanted if name not in entries]
        parts = [
            _list("missing", missing),
            _list("not part of this model", extra),
            _list("stored twice", twice),
            _list("", wrong),
        ]
        if any(parts):
            raise CheckpointError(
                f"{self.folder} is no whole checkpoint of the {self.published.family} model in its config.json "
                f"({len(wanted):,} tensors): {'; '.join(filter(None, parts))}. Fetch the files again, or correct config.json"
            )
        self.notes += [f"skipped {count} {what}" for what, count in skipped.items()]
        self.notes += [f"{count} tensors are stored in {how}" for how, count in widened.items()]
        return entries, packed

    def dtype(self, name: str) -> str:
        """See `Source`."""
        return self.entries[name].dtype if name in self.entries else "BF16"

    def pieces(self, name: str) -> Iterator[Tensor]:
        """See `Source`."""
        if name in self.entries:
            yield from self._reader.pieces(self.entries[name])
        else:
            base = name.removesuffix(".weight")
            yield experts.decode(*self._stored_codes(base), f"{base}.weight")

    def _stored_codes(self, base: str) -> tuple[Tensor, Tensor]:
        packed, scale = self.entries[f"{base}.weight_packed"], self.entries[f"{base}.weight_scale"]
        return self._reader.read(packed).view(packed.shape), self._reader.read(scale).view(torch.uint8).view(
            scale.shape
        )

    def codes(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """See `Source`."""
        if self.packed:
            packed, scale = self._stored_codes(name)
            experts.check_scale(scale, f"{name}.weight")
            return packed, scale
        return experts.encode(self._reader.read(self.entries[f"{name}.weight"]).view(shape), f"{name}.weight")

    def kept_scale(self, name: str) -> Tensor | None:
        """See `Source`."""
        if not self.packed:
            return None
        entry = self.entries[f"{name}.weight_scale"]
        scale = self._reader.read(entry).view(torch.uint8).view(entry.shape)
        experts.check_scale(scale, f"{name}.weight")
        return scale

    def identity(self) -> list[tuple[str, int, int]]:
        """See `Source`."""
        files = sorted({entry.file for entry in self.entries.values()} | {self.folder / "config.json"})
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def is_published(folder: Path) -> bool:
    """True if the folder looks like a published checkpoint."""
    return (folder / "config.json").is_file() and not (folder / "config.toml").exists()


def _collect(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder's safetensors files, under the names in the files."""
    if (folder / INDEX).exists():
        told = _read_index(folder / INDEX)
        files = sorted(set(told.values()))
        absent = [name for name in files if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{folder / INDEX} points to {_some(absent)}, which {'is' if len(absent) == 1 else 'are'} not there; "
                "fetch the missing files"
            )
    else:
        told, files = None, sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no weights: neither {INDEX} nor a .safetensors file")
    found: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            if name in found:
                raise CheckpointError(
                    f"{name} is in two files, {found[name].file.name} and {file}; remove the stale one"
                )
            found[name] = entry
    if told is not None:
        lost = [f"{name} ({file})" for name, file in told.items() if name not in found or found[name].file.name != file]
        if lost:
            raise CheckpointError(f"{folder / INDEX} names tensors that are not in the file it gives: {_some(lost)}")
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) and file == Path(file).name for file in told.values()):
            raise ValueError("a file name in weight_map has a folder in it")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error})") from None
    return told


def _canonical(stored: str, wanted: Mapping[str, TensorSpec], k3: bool) -> str | None:
    """The table's name for a tensor's stored name; None if it has none."""
    if stored in wanted:
        return stored
    root = "language_model." if k3 else ""
    tries = [f"{root}model.{stored.removeprefix(root)}"] if stored.startswith(root) else []
    if not k3:  # transformers saves the dense MLP under the experts' prefix
        tries.append(stored.replace(".block_sparse_moe.", ".mlp."))
    return next((name for name in tries if name in wanted), None)


def _problem(spec: TensorSpec, entry: Entry) -> str:
    """What is wrong with a stored tensor, in words; empty if it can be used."""
    floats = ("BF16", "F32")
    if entry.dtype != spec.dtype and not (entry.dtype in floats and spec.dtype in floats):
        scale = entry.dtype == "F8_E8M0" and spec.name.endswith(".weight_scale")
        if not scale:
            return f"is {entry.dtype} instead of {spec.dtype}"
    squeezed, needed = ([n for n in shape if n != 1] for shape in (entry.shape, spec.shape))
    lenient = spec.name.endswith((".weight_scale", ".A_log"))
    if entry.shape != spec.shape and not (lenient and squeezed == needed):
        return f"has the shape {list(entry.shape)} instead of {list(spec.shape)}"
    return ""


def _stored_heads(published: PublishedConfig, found: dict[str, Entry]) -> PublishedConfig:
    """Take the length of A_log from the file: config.json does not hold it."""
    lengths = {entry.count for name, entry in found.items() if name.endswith(".A_log")}
    kda = published.model.kda
    if len(lengths) != 1 or kda is None or (length := lengths.pop()) < kda.num_heads:
        return published  # the table's check names what is wrong
    stored = None if length == kda.num_heads else length
    return replace(published, model=replace(published.model, kda=replace(kda, stored_heads=stored)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _list(what: str, names: list[str]) -> str:
    return f"{what}: {_some(names)}" if what and names else _some(names)
