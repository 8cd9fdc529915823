"""The data of a run: text from the config's sources, the run's own tokenizer, batches, held-out documents."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perilune.config.train import TrainConfig
from perilune.data.corpus import read_paths, standard_library
from perilune.data.curriculum import Curriculum
from perilune.data.document import Corpus
from perilune.data.drawn import Catalogue, DocumentWriter, DrawnSource, kinds
from perilune.data.image_input import image_processor
from perilune.data.loader import Loader
from perilune.data.prepare import PreparedData, prepare, training_sources
from perilune.data.shards import TokenStream
from perilune.data.sources import TextSource
from perilune.data.split import split
from perilune.rundir import RunDir
from perilune.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class RunData:
    """What a trainer reads.

    Attributes:
        tokenizer: the run's; `tokenizer.json` in the run folder.
        loader: batches by step.
        held_out: documents that are never trained on.
        token_bytes: int64 `[vocabulary]`, bytes of each id, 0 for control ids.
        prepared: the cached store behind it.
        pictures: the drawn pictures among the batches; None if there are none.
    """

    tokenizer: Tokenizer
    loader: Loader
    held_out: TokenStream
    token_bytes: NDArray[np.int64]
    prepared: PreparedData
    pictures: DrawnSource | None = None


def cache_directory() -> Path:
    """Where prepared corpora are kept between runs: $PERILUNE_CACHE, else the user's cache directory."""
    root = os.environ.get("PERILUNE_CACHE")
    if root:
        return Path(root) / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perilune" / "data"


def read_corpus(config: TrainConfig) -> Corpus:
    """The text that `config.data` names; nothing named = the interpreter's standard library."""
    data = config.data
    return read_paths(data.path, field=data.field, on_bad_text=data.on_bad_text) if data.path else standard_library()


def open_data(config: TrainConfig, run: RunDir, *, cache: Path | None = None) -> RunData:
    """Prepare (or find in the cache) the data of a run; a new run gets its tokenizer.json and split.json.

    A run that has a tokenizer keeps it, whatever the cache would train anew.

    Args:
        config: the run's.
        run: its folder.
        cache: where prepared corpora lie; None = `cache_directory()`.

    Raises:
        RequestError: no usable text.
        ConfigError: the tokenizer has more ids than the model.
    """
    corpus = read_corpus(config)
    options = {
        "holdout": config.data.holdout,
        "vocab_size": config.model.vocab_size,
        "cache": cache or cache_directory(),
    }
    prepared = prepare(corpus, tokenizer=config.data.tokenizer, **options)
    if run.tokenizer_path.exists():
        own = load_tokenizer(run.tokenizer_path)
        if own.fingerprint != prepared.tokenizer.fingerprint:
            prepared = prepare(corpus, tokenizer=str(run.tokenizer_path), **options)
    else:
        _describe_split(run, corpus, config, prepared)
        prepared.tokenizer.save(run.tokenizer_path)
    data, pictures = config.data, _pictures(config, prepared)
    sources = training_sources(
        prepared,
        synthetic=data.synthetic,
        synthetic_fraction=data.synthetic_fraction,
        long_document_weight=data.long_document_weight,
        pictures=pictures,
        pictures_share=data.vision.share,
    )
    curriculum = Curriculum(
        [(stage.seq_len, stage.fraction) for stage in config.stages],
        steps=config.steps,
        tokens_per_step=config.tokens_per_step,
    )
    text = sources["text"][0]
    if isinstance(text, TextSource):
        for stage in config.stages:
            text.windows_per_epoch(stage.seq_len)  # too little text is told now, not in the middle of the run
    loader = Loader(sources, curriculum, seed=config.seed)
    return RunData(prepared.tokenizer, loader, prepared.held_out, prepared.token_bytes, prepared, pictures)


def _pictures(config: TrainConfig, prepared: PreparedData) -> DrawnSource | None:
    """The run's drawn pictures; None if it has none. ConfigError if Pillow is missing or a window is too short."""
    vision = config.data.vision
    if vision.share == 0.0:
        return None
    catalogue = Catalogue(kinds(vision.kinds), vision.image_size, config.seed)
    writer = DocumentWriter(prepared.tokenizer, image_processor(config), chat=vision.chat)
    source = DrawnSource(catalogue, writer, prepared.train)
    source.window(0, min(stage.seq_len for stage in config.stages), [config.seed])
    return source


def _describe_split(run: RunDir, corpus: Corpus, config: TrainConfig, prepared: PreparedData) -> None:
    """Write split.json: names of the held-out documents, sizes of both parts, what is in neither."""
    parts = split(corpus, holdout=config.data.holdout)
    stores = {"train": prepared.train, "held_out": prepared.held_out}
    sizes = {
        name: {
            "documents": len(store.offsets) - 1,
            "tokens": store.num_tokens,
            "bytes": int(store.text_bytes.sum()),
            "fingerprint": store.fingerprint,
        }
        for name, store in stores.items()
    }
    run.write_json(
        "split.json",
        sizes
        | {
            "source": list(config.data.path) or "python standard library",
            "cache": str(prepared.path),
            "held_out_groups": sorted({d.group for d in parts.held_out}),
            "held_out_names": [d.name for d in parts.held_out],
            "left_out": [{"name": i.name, "reason": i.reason, "bytes": i.num_bytes} for i in prepared.left_out],
        },
    )


def absolute(config: TrainConfig) -> TrainConfig:
    """The config with absolute data paths, so that a run can be resumed from any directory."""
    paths = tuple(str(Path(p).expanduser().absolute()) for p in config.data.path)
    tokenizer = config.data.tokenizer
    if tokenizer not in ("bpe", "byte"):
        tokenizer = str(Path(tokenizer).expanduser().absolute())
    return replace(config, data=replace(config.data, path=paths, tokenizer=tokenizer))
