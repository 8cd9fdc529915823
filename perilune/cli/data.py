"""`perilune data [stats | inspect | build mixed]`: look at a corpus before training on it, or build a larger one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from perilune.config.parse import parse_flags
from perilune.data.corpus import read_paths, standard_library
from perilune.data.document import Corpus, Document
from perilune.data.mixed import build_mixed, collect_mixed
from perilune.data.split import Split, split
from perilune.errors import ConfigError
from perilune.tokenizer import Tokenizer, load_tokenizer, train_bpe

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class CorpusFlags:
    """Which text, and what to count.

    Attributes:
        path: files, directories or globs; nothing = the Python sources of the standard library.
        field: text field of jsonl records and parquet rows.
        on_bad_text: what to do with a file that is not UTF-8: error | skip | replace.
        holdout: share that is held out.
        tokenizer: count tokens too: bpe (trained here on the training part) | byte | a tokenizer.json | none.
        vocab_size: of the bpe.
        json: one JSON object on stdout.
    """

    path: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    field: str = "text"
    on_bad_text: str = "error"
    holdout: float = 0.1
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class BuildFlags:
    """What `perilune data build mixed` collects from this machine. Nothing is downloaded.

    Attributes:
        out: directory of corpus.jsonl and manifest.json.
        packages: import names to take from site-packages beside the standard library; nothing = all.
        dry_run: only show what would be taken, with licences.
        json: one JSON object on stdout.
    """

    out: Path = Path("corpus")
    packages: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    action = args[0] if args and args[0] in ("stats", "inspect", "build") else "stats"
    rest = args[1:] if args and args[0] == action else args
    if action == "build":
        if rest[:1] != ["mixed"] and not {"-h", "--help"} & set(rest):
            raise ConfigError(
                f"perilune data build {' '.join(rest[:1])}: the only recipe is `mixed`".replace(" :", ":")
            )
        return _build(rest[1:] if rest[:1] == ["mixed"] else rest)
    flags = parse_flags(CorpusFlags, rest, CorpusFlags(), prog=f"perilune data {action}", description=__doc__ or "")
    if not 0.0 < flags.holdout < 1.0:
        raise ConfigError(f"--holdout {flags.holdout} must lie strictly between 0 and 1")
    corpus = (
        read_paths(flags.path, field=flags.field, on_bad_text=flags.on_bad_text) if flags.path else standard_library()
    )
    parts = split(corpus, holdout=flags.holdout)
    tokenizer = _tokenizer(flags, parts.train)
    facts = describe(corpus, parts, tokenizer)
    if action == "inspect":
        facts["list"] = _listing(parts, tokenizer)
    if flags.json:
        print(json.dumps(facts))
    else:
        _print(facts, flags)
    return 0


def describe(corpus: Corpus, parts: Split, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Sizes of a corpus and of its two parts."""
    facts: dict[str, Any] = {
        "documents": len(corpus.documents),
        "bytes": corpus.num_bytes,
        "fingerprint": corpus.fingerprint,
        "train": _part(parts.train, tokenizer),
        "held_out": _part(parts.held_out, tokenizer),
        "held_out_groups": sorted({document.group for document in parts.held_out}),
        "left_out": [{"name": i.name, "reason": i.reason, "bytes": i.num_bytes} for i in parts.left_out],
    }
    if tokenizer is not None:
        facts["vocab_size"] = tokenizer.vocab_size
    return facts


def _tokenizer(flags: CorpusFlags, train: Sequence[Document]) -> Tokenizer | None:
    if flags.tokenizer == "none":
        return None
    if flags.tokenizer == "bpe":
        return train_bpe([document.text for document in train], flags.vocab_size, sample_bytes=4_000_000)
    return load_tokenizer(flags.tokenizer)


def _part(documents: Sequence[Document], tokenizer: Tokenizer | None) -> dict[str, Any]:
    sizes = sorted(document.num_bytes for document in documents)
    facts: dict[str, Any] = {
        "documents": len(documents),
        "groups": len({document.group for document in documents}),
        "bytes": sum(sizes),
        "median_document_bytes": sizes[len(sizes) // 2],
        "largest_document_bytes": sizes[-1],
    }
    if tokenizer is not None:
        # every document ends with [EOS]
        facts["tokens"] = sum(len(ids) + 1 for ids in tokenizer.encode_batch([d.text for d in documents]))
    return facts


def _listing(parts: Split, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    rows = []
    for part, documents in (("train", parts.train), ("held_out", parts.held_out)):
        counts = tokenizer.encode_batch([d.text for d in documents]) if tokenizer else [[]] * len(documents)
        for document, ids in zip(documents, counts):
            row = {"name": document.name, "group": document.group, "part": part, "bytes": document.num_bytes}
            rows.append(row | ({"tokens": len(ids) + 1} if tokenizer else {}) | {"sha256": document.sha256})
    return sorted(rows, key=lambda row: row["name"])


def _print(facts: dict[str, Any], flags: CorpusFlags) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    source = ", ".join(flags.path) or "the standard library of this Python"
    columns = ["documents", "groups", "bytes", "median_document_bytes", "largest_document_bytes"]
    columns += ["tokens"] if "tokens" in facts["train"] else []
    table = Table(title=source, title_justify="left")
    table.add_column("part")
    for column in columns:
        table.add_column(column.replace("_document_bytes", " document").replace("_", " "), justify="right")
    for part in ("train", "held_out"):
        table.add_row(part.replace("_", "-"), *[f"{facts[part][column]:,}" for column in columns])
    console.print(table)
    for row in facts.get("list", []):
        tokens = f"{row['tokens']:>10,} tokens" if "tokens" in row else ""
        print(f"{row['part']:<9}{row['bytes']:>12,} bytes {tokens}  {row['name']}")
    groups = facts["held_out_groups"]
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    print(f"held out: {', '.join(groups[:_SHOWN])}{more}")
    for item in facts["left_out"][:_SHOWN]:
        print(f"left out: {item['name']} ({item['bytes']:,} bytes): {item['reason']}")
    if len(facts["left_out"]) > _SHOWN:
        print(f"left out: {len(facts['left_out']) - _SHOWN} more (--json lists all)")


def _build(args: list[str]) -> int:
    flags = parse_flags(BuildFlags, args, BuildFlags(), prog="perilune data build mixed", description=__doc__ or "")
    if flags.dry_run:
        corpus, origins = collect_mixed(flags.packages)
        facts: dict[str, Any] = {"documents": len(corpus.documents), "bytes": corpus.num_bytes}
        facts["origins"] = [
            {"package": o.package, "version": o.version, "licence": o.licence}
            for o in sorted(set(origins.values()), key=lambda o: o.package)
        ]
    else:
        facts = build_mixed(flags.out, flags.packages)
        facts = {key: value for key, value in facts.items() if key not in ("files", "left_out")}
        facts |= {"corpus": str(flags.out / "corpus.jsonl"), "manifest": str(flags.out / "manifest.json")}
    if flags.json:
        print(json.dumps(facts))
        return 0
    for row in facts["origins"]:
        size = f"{row['bytes']:>12,} bytes  " if "bytes" in row else ""
        print(f"{size}{row['package']} {row['version']}: {row['licence']}")
    print(f"{facts['documents']:,} documents, {facts['bytes']:,} bytes")
    if not flags.dry_run:
        print(f"{facts['corpus']} (licences and hashes: {facts['manifest']})")
        print(f"next: perilune train --data {shlex.quote(facts['corpus'])}")
    return 0
