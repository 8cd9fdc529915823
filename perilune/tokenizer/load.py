"""Finding out which tokenizer a path or name means."""

from __future__ import annotations

import json
from pathlib import Path

from perilune.errors import RequestError
from perilune.tokenizer.bpe import BPETokenizer
from perilune.tokenizer.byte import ByteTokenizer
from perilune.tokenizer.interface import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a tokenizer.json, a directory (a run or a model) that holds one, or the word "byte".

    Raises:
        RequestError: nothing readable there.
        ConfigError: the file is no byte-level BPE with the control tokens that the models need.
    """
    if str(path) == "byte":
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    try:
        definition = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read the tokenizer {file}: {error}; give a tokenizer.json, a directory with one, or 'byte'"
        ) from None
    try:
        marker = json.loads(definition)
    except ValueError as error:
        raise RequestError(f"{file} is not JSON ({error}); give a tokenizer.json") from None
    if isinstance(marker, dict) and marker.get("type") == "perilune-byte":
        return ByteTokenizer()
    return BPETokenizer(definition)
