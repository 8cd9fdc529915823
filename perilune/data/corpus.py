"""Where text comes from: the interpreter's own library, installed packages, or the user's files.

The default corpus is text that every machine already has: the Python sources of the running interpreter's standard
library, about 12 MB without its tests. Nothing is downloaded and no third-party text is committed.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from perilune.data.document import Corpus, Document, LeftOut
from perilune.errors import ConfigError, RequestError

BAD_TEXT_POLICIES = ("error", "skip", "replace")
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
_BINARY_PROBE_BYTES = 8192


def standard_library() -> Corpus:
    """Python sources of the running interpreter's standard library, without its tests.

    A group is a top-level module or package. A file in another encoding than UTF-8 is left out.

    Raises:
        RequestError: the interpreter keeps no sources (a frozen or zipped library).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = _python_sources(root, "stdlib") if root.is_dir() else Corpus(())
    if not corpus.documents:
        raise RequestError(f"{root} holds no Python sources; name your own text with --data")
    return corpus


def site_packages(packages: Sequence[str] = ()) -> Corpus:
    """Python sources of installed packages, without their tests.

    Args:
        packages: top-level import names; empty = everything installed.

    Raises:
        RequestError: a named package is not installed as sources; suggests near names.
    """
    roots = _site_package_roots()
    installed = sorted({_top(entry) for root in roots for entry in root.iterdir() if _is_module(entry)})
    missing = [name for name in packages if name not in installed]
    if missing:
        near = [match for name in missing for match in difflib.get_close_matches(name, installed)]
        hint = f"did you mean {', '.join(near)}" if near else f"{len(installed)} packages are"
        raise RequestError(f"no sources of {', '.join(missing)} are installed; {hint} in {', '.join(map(str, roots))}")
    corpora = [_python_sources(root, "site-packages", packages or installed) for root in roots]
    return Corpus.of(
        (document for part in corpora for document in part.documents),
        (item for part in corpora for item in part.left_out),
    )


def read_paths(paths: Sequence[str | Path], *, field: str = "text", on_bad_text: str = "error") -> Corpus:
    """The user's own text.

    A file is one document and its own group; of a directory every file below it is taken, hidden and binary ones
    aside, and its top-level entries are the groups. Each record of a `.jsonl` file and each row of a `.parquet` file
    is a document and a group of its own, unless a jsonl record names itself (`name`) or its group (`group`).

    Args:
        paths: files, directories, or glob patterns.
        field: the text field of jsonl records and parquet rows.
        on_bad_text: for a text file that is not UTF-8: `error`, `skip` (leave it out), or `replace` (U+FFFD).

    Raises:
        RequestError: an empty path or nothing at one, a file that cannot be read or is not UTF-8 (names the file and the byte
            offset), a broken record, or no text at all.
        ConfigError: unknown policy; parquet without pyarrow.
    """
    if on_bad_text not in BAD_TEXT_POLICIES:
        raise ConfigError(f"on_bad_text={on_bad_text!r} is not known; allowed: {', '.join(BAD_TEXT_POLICIES)}")
    left_out: list[LeftOut] = []
    documents: list[Document] = []
    for path, name, group, named in _files(paths):
        if path.suffix == ".jsonl":
            documents += _jsonl(path, name, field)
        elif path.suffix == ".parquet":
            documents += _parquet(path, name, field)
        else:
            data = _read(path)
            if not named and b"\0" in data[:_BINARY_PROBE_BYTES]:
                left_out.append(LeftOut(name, "binary", len(data)))
                continue
            text = _decode(data, path, on_bad_text)
            if text is None:
                left_out.append(LeftOut(name, "not UTF-8", len(data)))
            else:
                documents.append(Document.of(name, group, text))
    corpus = Corpus.of(documents, left_out)
    if not corpus.documents:
        given = ", ".join(str(path) for path in paths)
        why = f" ({len(left_out)} files left out, e.g. {left_out[0].name}: {left_out[0].reason})" if left_out else ""
        raise RequestError(
            f"no text in {given or 'an empty list of paths'}{why}; give a file, directory or glob with text"
        )
    return corpus


def _site_package_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(path) for path in dict.fromkeys([paths["purelib"], paths["platlib"]])]


def _top(entry: Path) -> str:
    return entry.name.removesuffix(".py")


def _is_module(entry: Path) -> bool:
    return entry.name.removesuffix(".py").isidentifier() and (entry.suffix == ".py" or entry.is_dir())


def _python_sources(root: Path, label: str, modules: Collection[str] | None = None) -> Corpus:
    """Sources of the top-level modules and packages in `root` (None = all)."""
    documents, left_out = [], []
    for top in sorted(root.iterdir()):
        if top.name in _NOT_SOURCES | _TESTS or (modules is not None and _top(top) not in modules):
            continue
        for path in _walk(top, _NOT_SOURCES | _TESTS) if top.is_dir() else [top]:
            if path.suffix != ".py" or not path.is_file():
                continue
            name, data = f"{label}/{path.relative_to(root).as_posix()}", _read(path)
            try:
                documents.append(Document.of(name, f"{label}/{_top(top)}", data.decode("utf-8")))
            except UnicodeDecodeError:
                left_out.append(LeftOut(name, "not UTF-8", len(data)))
    return Corpus.of(documents, left_out)


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _files(paths: Sequence[str | Path]) -> Iterator[tuple[Path, str, str, bool]]:
    """(path, name, group, whether the user named this very file)."""
    for given in paths:
        if not str(given):  # an unset variable of a shell; as a path it would be the whole current directory
            raise RequestError("a path of the text is empty; name files, directories or globs")
        path = Path(given).expanduser()
        if path.is_dir():
            root = path.resolve().name
            for file in _walk(path, {"__pycache__"}):
                relative = file.relative_to(path).as_posix()
                yield file, f"{root}/{relative}", f"{root}/{relative.partition('/')[0]}", False
        elif path.exists():
            yield path, path.name, path.name, True
        elif glob.has_magic(str(path)):
            matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            if not matches:
                raise RequestError(f"no file matches {given}")
            for match in matches:
                yield Path(match), Path(match).as_posix(), Path(match).as_posix(), True
        else:
            raise RequestError(f"no such file or directory: {given} (looked in {Path.cwd()})")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from None


def _decode(data: bytes, path: Path, on_bad_text: str) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if on_bad_text == "replace":
            return data.decode("utf-8-sig", errors="replace")
        if on_bad_text == "skip":
            return None
        # utf-8-sig counts from after the byte-order mark
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") and len(error.object) < len(data) else 0)
        raise RequestError(
            f"{path} is not UTF-8: byte {data[offset]:#04x} at offset {offset}; convert the file, or set "
            "on-bad-text to skip or replace"
        ) from None


def _jsonl(path: Path, name: str, field: str) -> Iterator[Document]:
    text = _decode(_read(path), path, "error")
    assert text is not None, "the error policy never returns None"
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} line {number} is not JSON: {error}") from None
        keys = list(record) if isinstance(record, dict) else type(record).__name__
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise RequestError(
                f"{path} line {number} has no text in field {field!r} (it has {keys}); set the field that has it"
            )
        place = f"{name}:{number:08d}"
        own_name, group = record.get("name"), record.get("group")
        yield Document.of(
            own_name if isinstance(own_name, str) else place,
            group if isinstance(group, str) else place,
            record[field],
        )


def _parquet(path: Path, name: str, field: str) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"reading {path} needs pyarrow: pip install 'perilune[data]'") from None
    try:
        file = ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise RequestError(
                f"{path} has no column {field!r} (it has {file.schema_arrow.names}); set the field that has it"
            )
        number = 0
        for batch in file.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise RequestError(f"{path} row {number}: column {field!r} holds {type(value).__name__}, not text")
                record_name = f"{name}:{number:08d}"
                yield Document.of(record_name, record_name, value)
                number += 1
    except (ArrowException, OSError) as error:
        raise RequestError(f"cannot read {path} as parquet: {error}") from None
