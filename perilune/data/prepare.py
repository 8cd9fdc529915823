"""From a corpus to everything a run reads: tokenizer, training tokens, held-out tokens. Cached by content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perilune.data.cleaning import long_document_repeats
from perilune.data.document import Corpus, Document, LeftOut
from perilune.data.shards import FORMAT, RepeatedDocuments, TokenStore, TokenStream, write_store
from perilune.data.sources import Source, SyntheticSource, TextSource
from perilune.data.split import split
from perilune.data.synthetic import TASKS
from perilune.errors import ConfigError, RequestError
from perilune.rundir import disk_errors, sync_directory, write_atomic
from perilune.tokenizer import Tokenizer, load_tokenizer, train_bpe

BPE_SAMPLE_BYTES = 4_000_000
"""Text that the BPE merges are learnt from; more changes the compression by about 1 %."""

RECIPE = 2
"""Version of the split, of the BPE training and of the encoding: raised when any of them changes its result."""

_ENCODE_CHARS = 1 << 22


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What a run trains and is scored on.

    Attributes:
        path: the cache directory with all of it, `tokenizer.json` included.
        tokenizer: trained on the training part only, if it was trained.
        train, held_out: token stores.
        left_out: documents that are in neither part, with reasons.
    """

    path: Path
    tokenizer: Tokenizer
    train: TokenStore
    held_out: TokenStore
    left_out: tuple[LeftOut, ...]

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """int64 `[vocabulary]`: bytes of each id, 0 for control ids."""
        return np.array(self.tokenizer.byte_lengths(), dtype=np.int64)

    def held_out_bytes(self) -> bytes:
        """The held-out text, documents end to end in order."""
        return self.tokenizer.decode_bytes(self.held_out.read(0, self.held_out.num_tokens).tolist())


def prepare(corpus: Corpus, *, holdout: float, tokenizer: str, vocab_size: int, cache: Path) -> PreparedData:
    """Split, train the tokenizer, encode, and write; or open what an equal call wrote before.

    Args:
        corpus: the text.
        holdout: share to hold out, see `split`.
        tokenizer: `bpe` (trained on the training part), `byte`, or the path of a tokenizer.json.
        vocab_size: the model's; a trained BPE has exactly as many ids, another tokenizer may have fewer.
        cache: directory in which a sub-directory named by the fingerprint of all arguments is made.

    Raises:
        RequestError: the corpus cannot be split.
        ConfigError: the tokenizer has more ids than the model.
        CapacityError: the cache's disk is full.
        RequestError: the cache cannot be written.
    """
    given = None if tokenizer == "bpe" else load_tokenizer(tokenizer)
    if given is not None and given.vocab_size > vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer} has {given.vocab_size} ids, the model only {vocab_size}; set model.vocab_size to at "
            f"least {given.vocab_size}"
        )
    recipe = [FORMAT, RECIPE, corpus.fingerprint, holdout, given.fingerprint if given else BPE_SAMPLE_BYTES, vocab_size]
    path = cache / hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
    if not path.exists():
        _writable(cache)
        with disk_errors(path), tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as temporary:
            _build(Path(temporary, "data"), corpus, holdout, given, vocab_size)
            if not path.exists():  # another process may have built the same meanwhile
                os.rename(Path(temporary, "data"), path)
            sync_directory(cache)
    left_out = json.loads((path / "left_out.json").read_text())
    return PreparedData(
        path,
        load_tokenizer(path),
        TokenStore(path / "train"),
        TokenStore(path / "held_out"),
        tuple(LeftOut(**item) for item in left_out),
    )


def _writable(cache: Path) -> None:
    """Make the cache's directory; RequestError if it cannot be made or written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(cache, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise RequestError(
            f"prepared text cannot be kept in {cache}: {reason}; set PERILUNE_CACHE to a directory that can be written"
        )


def training_sources(
    data: PreparedData,
    *,
    synthetic: Sequence[str] = (),
    synthetic_fraction: float = 0.0,
    long_document_weight: float = 0.0,
    pictures: Source | None = None,
    pictures_share: float = 0.0,
) -> dict[str, tuple[Source, float]]:
    """The weighted sources of a training run, for `Loader`.

    Args:
        data: the prepared text.
        synthetic: names of synthetic tasks, taken in turn.
        synthetic_fraction: their share of the windows.
        long_document_weight: exponent of up-sampling by length, see `long_document_repeats`; 0 = off.
        pictures: windows with pictures.
        pictures_share: their share of the windows.

    Raises:
        ConfigError: an unknown task, or one with more symbols than the vocabulary has ordinary ids.
    """
    unknown = [name for name in synthetic if name not in TASKS]
    if unknown:
        raise ConfigError(f"unknown synthetic tasks {unknown}; allowed: {', '.join(TASKS)}")
    text: TokenStream = data.train
    if long_document_weight:
        text = RepeatedDocuments(data.train, long_document_repeats(np.diff(data.train.offsets), long_document_weight))
    sources: dict[str, tuple[Source, float]] = {"text": (TextSource(text), 1.0 - synthetic_fraction - pictures_share)}
    if synthetic_fraction > 0:
        tasks = [TASKS[name]() for name in synthetic]
        ordinary = min(data.tokenizer.special.ids.values())
        sources["synthetic"] = (SyntheticSource(tasks, ordinary), synthetic_fraction)
    if pictures is not None:
        sources["pictures"] = (pictures, pictures_share)
    return sources


def _build(path: Path, corpus: Corpus, holdout: float, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    parts = split(corpus, holdout=holdout)
    if tokenizer is None:
        texts = [document.text for document in parts.train]
        tokenizer = train_bpe(texts, vocab_size, sample_bytes=BPE_SAMPLE_BYTES)
    for name, documents in (("train", parts.train), ("held_out", parts.held_out)):
        digest = hashlib.sha256(tokenizer.fingerprint.encode())
        for document in documents:
            digest.update(document.sha256.encode())
        write_store(
            path / name,
            _encoded(tokenizer, documents),
            eos=tokenizer.special.eos,
            vocab_size=tokenizer.vocab_size,
            fingerprint=digest.hexdigest(),
        )
    tokenizer.save(path / "tokenizer.json")
    items = [{"name": item.name, "reason": item.reason, "num_bytes": item.num_bytes} for item in parts.left_out]
    write_atomic(path / "left_out.json", json.dumps(items, indent=1).encode())


def _encoded(tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[tuple[list[int], int]]:
    """Encode several megabytes at a time: enough for every core, never the whole corpus."""
    batch: list[Document] = []
    size = 0
    for number, document in enumerate(documents, start=1):
        batch.append(document)
        size += len(document.text)
        if size >= _ENCODE_CHARS or number == len(documents):
            ids = tokenizer.encode_batch([each.text for each in batch])
            yield from zip(ids, [each.num_bytes for each in batch])
            batch, size = [], 0
