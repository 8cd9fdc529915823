"""The small files of a converted checkpoint or run; the one that makes readers take the folder for whole comes last."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perilune.config.parse import to_toml
from perilune.config.published import generation_config, to_json, without_extra_layers
from perilune.config.train import DataConfig, TrainConfig
from perilune.data.image import published as preprocessor
from perilune.data.image_input import image_processor
from perilune.errors import ConfigError, RequestError
from perilune.loading.native import PUBLISHED, TOKENIZERS, NativeSource, index_of
from perilune.model.hf import PlannedFile, Source
from perilune.model.hf.source import INDEX
from perilune.rundir import config_hash, sync_directory, write_atomic
from perilune.tokenizer import load_tokenizer

SUMS = "SHA256SUMS"
CHECKPOINT = "checkpoints/step-00000000"


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _copy_side_files(given: Source, folder: Path, names: Callable[[str], bool]) -> None:
    for name, path in given.side_files.items():
        if names(name):
            shutil.copyfile(path, folder / name)


def finish_published(
    given: Source, partial: Path, planned: list[PlannedFile], done: dict[str, Any], experts: str
) -> None:
    """Documents beside the weights; config.json last, because readers take a folder with it for a checkpoint."""
    published = replace(without_extra_layers(given.published), experts=experts)
    _copy_side_files(given, partial, lambda name: True)
    if "generation_config.json" not in given.side_files:
        _write_json(partial / "generation_config.json", generation_config(published))
    if published.model.vision is not None and preprocessor.FILE not in given.side_files:
        config = given.config if isinstance(given, NativeSource) else TrainConfig(model=published.model)
        _write_json(partial / preprocessor.FILE, preprocessor.to_document(image_processor(config).cfg))
    _describe_tokenizer(given, partial)
    (partial / SUMS).write_text(
        "".join(f"{entry['sha256']}  {name}\n" for name, entry in done.items()), encoding="utf-8"
    )
    weight_map = {tensor.name: file.name for file in planned for tensor in file.tensors}
    index = {"metadata": {"total_size": sum(file.nbytes for file in planned)}, "weight_map": weight_map}
    _write_json(partial / INDEX, index)
    _write_json(partial / "config.json", to_json(published))


def _describe_tokenizer(given: Source, partial: Path) -> None:
    """A tokenizer.json of ours gets the small file that tells transformers how to load it."""
    path = partial / "tokenizer.json"
    if "tokenizer_config.json" in given.side_files or not path.exists():
        return
    try:
        definition = json.loads(path.read_text(encoding="utf-8"))
        known = {token["content"] for token in definition.get("added_tokens", [])}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        given.notes.append(f"tokenizer.json is damaged and was copied as it is: {type(error).__name__}: {error}")
        return
    if definition.get("type") == "perilune-byte":
        given.notes.append("the byte tokenizer is read by perilune only; other programs need the ids themselves")
        return
    names = {"bos_token": "[BOS]", "eos_token": "<|end_of_msg|>", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    known = {token["content"] for token in definition.get("added_tokens", [])}
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    _write_json(partial / "tokenizer_config.json", told | {key: name for key, name in names.items() if name in known})


def finish_native(
    given: Source, partial: Path, target: Path, files: dict[str, list[PlannedFile]], done: dict[str, Any], origin: str
) -> None:
    """A run folder around the checkpoint: tokenizer, published documents, state.json, and config.toml last."""
    kept = partial / PUBLISHED
    kept.mkdir(exist_ok=True)
    published = without_extra_layers(given.published)
    _copy_side_files(given, partial, lambda name: name in (*TOKENIZERS, "chat.json"))
    _copy_side_files(given, kept, lambda name: name not in (*TOKENIZERS, "chat.json"))
    _write_json(kept / "config.json", to_json(published))
    name = next((name for name in TOKENIZERS if name in given.side_files), None)
    tokenizer = None
    try:
        tokenizer = load_tokenizer(partial)
    except (RequestError, ConfigError) as error:
        given.notes.append(f"there is no tokenizer that can be read, so the run cannot generate text yet: {error}")
    (partial / "probes").mkdir(exist_ok=True)
    _write_json(partial / CHECKPOINT / "state.json", index_of(files, done, origin, tokenizer))
    sync_directory(partial / CHECKPOINT)
    data = DataConfig(tokenizer=str(target.resolve() / name)) if name else DataConfig()
    config = TrainConfig(model=published.model, data=data)
    write_atomic(partial / "config.toml", f"# sha256 {config_hash(config)}\n{to_toml(config)}".encode())
