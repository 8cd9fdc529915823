"""`perilune tokenize TEXT`: text to token ids and pieces, and ids back to text."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from perilune.config.parse import parse_flags
from perilune.errors import ConfigError, RequestError
from perilune.rundir import RunDir
from perilune.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizeFlags:
    """What `perilune tokenize` turns into what.

    Attributes:
        text: the text; without it and without --file, standard input.
        file: read this file instead, whatever bytes it holds.
        run: use the tokenizer of this run.
        tokenizer: use this tokenizer.json, or `byte`; without --run and --tokenizer, the demo's if there is one.
        decode: token ids, separated by spaces or commas, to turn back into text, control tokens by name; `-` reads them
            from standard input.
        json: one JSON object on stdout.
    """

    text: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    file: Path | None = None
    run: str | None = None
    tokenizer: str | None = None
    decode: str | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(TokenizeFlags, args, TokenizeFlags(), prog="perilune tokenize", description=__doc__ or "")
    if flags.run is not None and flags.tokenizer is not None:
        raise ConfigError(
            f"--run {flags.run} and --tokenizer {flags.tokenizer} both name a tokenizer; give one of them"
        )
    given = [
        name for name, value in (("a text", flags.text), ("--file", flags.file), ("--decode", flags.decode)) if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given; give one of them")
    tokenizer, source = _tokenizer(flags)
    facts: dict[str, Any] = {"tokenizer": source, "vocab_size": tokenizer.vocab_size}
    if flags.decode is not None:
        ids = _ids(sys.stdin.read() if flags.decode == "-" else flags.decode)
        text = tokenizer.decode(ids, skip_special=False)
        print(json.dumps(facts | {"tokens": len(ids), "ids": ids, "text": text}) if flags.json else text)
        return 0
    data = _input(flags)
    ids = tokenizer.encode_bytes(data)
    pieces = [tokenizer.piece(token_id) for token_id in ids]
    facts |= {"text_bytes": len(data), "tokens": len(ids), "ids": ids, "pieces": pieces}
    if flags.json:
        print(json.dumps(facts))
        return 0
    print(" ".join(map(str, ids)))
    print("|".join(piece.replace("\n", "\\n").replace("\t", "\\t") for piece in pieces))
    rate = f", {len(data) / len(ids):.2f} bytes a token" if ids else ""
    print(f"{len(ids)} tokens of {len(data)} bytes{rate}; tokenizer {source}, {tokenizer.vocab_size} ids")
    return 0


def _tokenizer(flags: TokenizeFlags) -> tuple[Tokenizer, str]:
    if flags.tokenizer is not None:
        return load_tokenizer(flags.tokenizer), flags.tokenizer
    demo = RunDir.resolve("demo").tokenizer_path
    if flags.run is None and not demo.exists():
        _log.info("no run named demo here: using the byte tokenizer (choose with --run or --tokenizer)")
        return load_tokenizer("byte"), "byte"
    path = demo if flags.run is None else RunDir.resolve(flags.run).tokenizer_path
    return load_tokenizer(path), str(path)


def _input(flags: TokenizeFlags) -> bytes:
    if flags.text:
        return " ".join(flags.text).encode("utf-8", errors="surrogateescape")
    if flags.file is None:
        return sys.stdin.buffer.read()
    try:
        return flags.file.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {flags.file}: {error.strerror}") from None


def _ids(text: str) -> list[int]:
    words = text.translate(str.maketrans(",[]", "   ")).split()
    bad = [word for word in words if not (word.isascii() and word.isdigit())]
    if bad:
        raise RequestError(f"{bad[0]!r} is not a token id; --decode wants numbers, separated by spaces or commas")
    return [int(word) for word in words]
