"""A larger corpus from what is installed: the standard library and the packages in site-packages.

The corpus is built on the user's machine and stays there; beside it lies a manifest that says where every text comes
from, under which licence, and its hash before cleaning.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from perilune import __version__
from perilune.data.cleaning import clean_corpus, drop_near_duplicates
from perilune.data.corpus import site_packages, standard_library
from perilune.data.document import Corpus, Document
from perilune.errors import RequestError
from perilune.rundir import disk_errors, write_atomic


@dataclass(frozen=True, slots=True)
class Origin:
    """Where texts come from: a distribution, its version, and the licence its metadata states."""

    package: str
    version: str
    licence: str


def collect_mixed(packages: Sequence[str] = ()) -> tuple[Corpus, dict[str, Origin]]:
    """Installed sources, uncleaned, and the origin of each group.

    Args:
        packages: import names to take from site-packages beside the standard library; empty = all of them.

    Raises:
        RequestError: a named package is not installed as sources.
    """
    parts = [standard_library(), site_packages(packages)]
    corpus = Corpus.of(
        (document for part in parts for document in part.documents),
        (item for part in parts for item in part.left_out),
    )
    python = Origin("python standard library", platform.python_version(), "PSF-2.0")
    distributions = metadata.packages_distributions()
    origins: dict[str, Origin] = {}
    for group in {document.group for document in corpus.documents}:
        label, _, module = group.partition("/")
        origins[group] = python if label == "stdlib" else _origin(module, distributions.get(module, []))
    return corpus, origins


def build_mixed(out: Path, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Build the corpus in the directory `out`: `corpus.jsonl`, cleaned and without near duplicates, and `manifest.json`.

    The records of `corpus.jsonl` have `text`, `name` and `group`; `perilune train --data out/corpus.jsonl` reads them.

    Returns:
        The manifest: totals, origins with licences, and name, sha256, bytes and group of every text.

    Raises:
        RequestError: a named package is not installed, or `out` already holds a corpus.
        CapacityError: the disk is full.
    """
    target = out / "corpus.jsonl"
    if target.exists():
        raise RequestError(f"{target} exists; remove it or choose another directory with --out")
    raw, origins = collect_mixed(packages)
    corpus = drop_near_duplicates(clean_corpus(raw))
    original = {document.name: document for document in raw.documents}
    manifest = {
        "built_by": f"perilune {__version__}",
        "documents": len(corpus.documents),
        "bytes": corpus.num_bytes,
        "fingerprint": corpus.fingerprint,
        "origins": _table(corpus, origins),
        "left_out": [{"name": i.name, "reason": i.reason, "bytes": i.num_bytes} for i in corpus.left_out],
        "files": [
            {"name": d.name, "group": d.group, "sha256": original[d.name].sha256, "bytes": original[d.name].num_bytes}
            for d in corpus.documents
        ],
    }
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "manifest.json", json.dumps(manifest, indent=1).encode())
    write_atomic(target, b"".join(map(_record, corpus.documents)))
    return manifest


def _record(document: Document) -> bytes:
    record = {"name": document.name, "group": document.group, "text": document.text}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _table(corpus: Corpus, origins: dict[str, Origin]) -> list[dict[str, Any]]:
    """One row an origin: package, version, licence, documents, bytes; largest first."""
    rows: dict[Origin, list[int]] = {}
    for document in corpus.documents:
        row = rows.setdefault(origins[document.group], [0, 0])
        row[0] += 1
        row[1] += document.num_bytes
    ordered = sorted(rows.items(), key=lambda item: (-item[1][1], item[0].package))
    return [
        {"package": o.package, "version": o.version, "licence": o.licence, "documents": n, "bytes": size}
        for o, (n, size) in ordered
    ]


def _origin(module: str, distributions: Sequence[str]) -> Origin:
    if not distributions:
        return Origin(module, "unknown", "unknown")
    name = distributions[0]
    facts = metadata.metadata(name)
    classifiers = [c.rpartition(" :: ")[2] for c in facts.get_all("Classifier") or [] if c.startswith("License ::")]
    candidates = [
        *(facts.get_all("License-Expression") or []),
        "; ".join(classifiers),
        *(facts.get_all("License") or []),
    ]
    stated = next((text.strip() for text in candidates if text.strip()), "unknown")
    return Origin(name, metadata.version(name), stated.partition("\n")[0][:120])
