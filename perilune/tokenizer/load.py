"""Finding out which tokenizer a path or name means."""

from __future__ import annotations

import json
from pathlib import Path

from perilune.errors import RequestError
from perilune.tokenizer.bpe import BPETokenizer
from perilune.tokenizer.byte import ByteTokenizer
from perilune.tokenizer.interface import Tokenizer
from perilune.tokenizer.tiktoken_file import TiktokenTokenizer, looks_like_ranks

_FILES = ("tokenizer.json", "tiktoken.model")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer; what kind it is is read from the file's content, not from its name.

    Args:
        path: a tokenizer.json, a published tiktoken.model, a directory (a run or a model) that holds one of them, or
            the word "byte".

    Raises:
        RequestError: nothing readable there.
        ConfigError: the file is no byte-level BPE with the control tokens that the models need.
    """
    if str(path) == "byte":
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in _FILES if (file / name).exists()), file / _FILES[0])
    advice = "give a tokenizer.json, a tiktoken.model, a directory with one, or 'byte'"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read the tokenizer {file}: {error.strerror}; {advice}") from None
    if looks_like_ranks(content) or (file.suffix == ".model" and content[:1] != b"{"):
        return TiktokenTokenizer(content, str(file))
    try:
        definition = content.decode("utf-8")
        marker = json.loads(definition)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is not JSON ({error}) and no rank file; {advice}") from None
    if isinstance(marker, dict) and marker.get("type") == "perilune-byte":
        return ByteTokenizer()
    return BPETokenizer(definition)
