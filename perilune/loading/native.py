"""Our run folder as a source of tensors, and as the target of a conversion.

A converted run has one checkpoint, `step-00000000`, in the ordinary format with three differences, none of which a reader of
the format notices: parameters lie in the dtype of the published file (BF16 stays BF16, so nothing is rounded on the way back;
loading widens them), there is no optimizer state, and the index may list one more kind of tensors, `scales`: the MXFP4 scales
that packed experts came with (see `model.hf.experts`). The published documents lie in `published/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from perilune import checkpoint
from perilune.config.published import PublishedConfig, load_config, publish
from perilune.errors import CheckpointError, ConfigError, RequestError
from perilune.loading.run import checkpoint_folder
from perilune.model.hf import PlannedFile, Source, experts, own_shapes, places
from perilune.model.hf.names import Place
from perilune.model.hf.shard_file import Entry, FileReader, Planned, aligned, read_header
from perilune.rundir import RunDir
from perilune.shapes.tensors import checkpoint_tensors, text_tensors
from perilune.tokenizer import Tokenizer, load_tokenizer

PUBLISHED = "published"
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class NativeSource:
    """A checkpoint of a run.

    Args:
        run: the run.
        step: which checkpoint; None = the newest whole one.

    Attributes:
        config: of the run; the others are those of `Source`.

    Raises:
        ConfigError: the model is of no published family.
        CheckpointError: there is no whole checkpoint, or it is of another model.
    """

    def __init__(self, run: RunDir, step: int | None = None) -> None:
        self.config = config = run.read_config()
        cfg, self._quant = config.model, config.quant
        self.folder = checkpoint_folder(run, step)
        self._index = checkpoint.read_index(self.folder)
        self.notes: list[str] = []
        self.side_files = {
            path.name: path for folder in (run.path / PUBLISHED, run.path) if folder.is_dir()
            for path in sorted(folder.iterdir())
            if path.is_file() and path.name != "config.json" and (folder.name == PUBLISHED or path.name in (*TOKENIZERS, "chat.json"))
        }  # fmt: skip
        self.published = self._config(run, cfg)
        self._own = self._entries("model")
        shapes = own_shapes(cfg)
        wrong = checkpoint.differences(shapes, {n: e.shape for n, e in self._own.items()}, "model", "checkpoint")
        if wrong:
            raise CheckpointError(f"checkpoint {self.folder} does not fit the model: {wrong}")
        self._places: dict[str, Place] = {place.name: place for place in places(cfg, shapes)}
        self._scales = self._entries("scales")
        self._reader = FileReader()

    def _config(self, run: RunDir, cfg: Any) -> PublishedConfig:
        document = run.path / PUBLISHED / "config.json"
        if document.exists():
            return replace(load_config(document), model=cfg)
        ids: dict[str, int] = {}
        try:
            special = load_tokenizer(run.path).special
            ids = {"bos": special.bos, "eos": special.end_of_msg, "pad": special.pad}
        except (RequestError, ConfigError) as error:
            self.notes.append(f"config.json gets no special token ids: {error}")
        return publish(cfg, experts="mxfp4" if self._quant.weights == "mxfp4" else "bf16", **ids)

    def _entries(self, kind: str) -> dict[str, Entry]:
        told = self._index["tensors"].get(kind, {})
        found: dict[str, Entry] = {}
        for file in sorted({entry["file"] for entry in told.values()}):
            found |= read_header(self.folder / file)
        if found.keys() != told.keys():
            raise CheckpointError(
                f"checkpoint {self.folder} contradicts its index: other tensors of kind {kind!r} in its files"
            )
        return found

    def dtype(self, name: str) -> str:
        """See `Source`."""
        return self._own[self._places[name].ours].dtype

    def pieces(self, name: str) -> Iterator[Tensor]:
        """See `Source`."""
        place = self._places[name]
        yield from self._reader.pieces(self._own[place.ours], place.start, place.start + place.count)

    def codes(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """See `Source`."""
        place = self._places[f"{name}.weight"]
        weight = self._reader.read(self._own[place.ours], place.start, place.start + place.count).view(shape)
        return experts.encode(weight, f"{name}.weight", self.kept_scale(name), self._quant.rule)

    def kept_scale(self, name: str) -> Tensor | None:
        """See `Source`."""
        entry = self._scales.get(f"{name}.weight_scale")
        return None if entry is None else self._reader.read(entry).view(entry.shape)

    def identity(self) -> list[tuple[str, int, int]]:
        """See `Source`."""
        files = [self.folder / name for name in (*self._index["files"], "state.json")]
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _numbered(kind: str, groups: dict[int, list[Planned]]) -> list[PlannedFile]:
    return [
        PlannedFile(f"{kind}-{number:05d}-of-{len(groups):05d}.safetensors", aligned(groups[group]))
        for number, group in enumerate(sorted(groups), start=1)
    ]


def native_files(source: Source) -> dict[str, list[PlannedFile]]:
    """The files of a checkpoint of ours by kind, model and scales; one file a layer, and one for what is in no layer."""
    cfg = source.published.model
    specs = {spec.name: spec for spec in checkpoint_tensors(cfg, packed_experts=False)}
    shapes = own_shapes(cfg)
    parts: dict[str, list[Place]] = {}
    for place in places(cfg, shapes):
        parts.setdefault(place.ours, []).append(place)
    model: dict[int, list[Planned]] = {}
    for name, shape in shapes.items():
        ordered = sorted(parts[name], key=lambda place: place.start)
        wide = any("F32" in (source.dtype(place.name), specs[place.name].dtype) for place in ordered)
        layer = _LAYER.search(name)
        model.setdefault(int(layer[1]) if layer else cfg.num_layers, []).append(
            Planned(name, "F32" if wide else "BF16", shape, lambda ordered=ordered: _chain(source, ordered))
        )
    files = {"model": _numbered("model", model)}
    scales: dict[int, list[Planned]] = {}
    if source.published.experts == "mxfp4":
        for spec in text_tensors(cfg, packed_experts=True):
            if spec.name.endswith(".weight_scale"):
                base = spec.name.removesuffix(".weight_scale")
                layer = _LAYER.search(spec.name)
                assert layer is not None, f"{spec.name} is in no layer"
                scales.setdefault(int(layer[1]), []).append(
                    Planned(spec.name, "U8", spec.shape, lambda base=base: [source.kept_scale(base)])
                )
        files["scales"] = _numbered("scales", scales)
    return files


def _chain(source: Source, ordered: list[Place]) -> Iterator[Tensor]:
    for place in ordered:
        yield from source.pieces(place.name)


def index_of(
    files: dict[str, list[PlannedFile]], done: dict[str, Any], origin: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The checkpoint's state.json. There is no training to resume: the loader's fingerprint fits no text."""
    tensors: dict[str, Any] = {
        kind: {
            tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "file": file.name}
            for file in planned for tensor in file.tensors
        }
        for kind, planned in files.items()
    }  # fmt: skip
    return {
        "format": checkpoint.FORMAT,
        "version": checkpoint.VERSION,
        "step": 0,
        "files": done,
        "tensors": {"optimizer": {}} | tensors,
        "state": {
            "tokens": 0,
            "converted_from": origin,
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint if tokenizer else "",
                "vocab_size": tokenizer.vocab_size if tokenizer else 0,
            },
            "loader": {"fingerprint": "converted, not trained here"},
        },
    }
