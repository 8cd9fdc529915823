"""`perilune tokenize TEXT`: text or a conversation to token ids and pieces, and ids back to text."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from perilune.cli.chat_media import media_sizes
from perilune.config.parse import parse_flags
from perilune.errors import ConfigError, RequestError
from perilune.rundir import RunDir
from perilune.tokenizer import Tokenizer, load_tokenizer
from perilune.tokenizer.xtml import Rendered, Wording, load_wording, render

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizeFlags:
    """What `perilune tokenize` turns into what.

    Attributes:
        text: the text; without it and without --file, standard input.
        file: read this file instead, whatever bytes it holds.
        run: use the tokenizer of this run.
        tokenizer: use this tokenizer.json or tiktoken.model, or `byte`; without --run and --tokenizer, the demo's if
            there is one.
        decode: token ids, separated by spaces or commas, to turn back into text, control tokens by name; `-` reads them
            from standard input.
        chat: a JSON file with a list of messages, or with a chat request (`messages`, `tools`, `tool_choice`,
            `response_format`, `reasoning_effort`), to render as a prompt; images and videos are data: URLs or files.
        tools: with --chat, a JSON file with a list of tools; it replaces those of the request.
        effort: with --chat, how much to think: low, high or max; it replaces the request's.
        thinking: with --chat, keep the thinking of the history and let the answer begin with thinking.
        wording: with --chat, a TOML file with the texts of the option messages.
        json: one JSON object on stdout.
    """

    text: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    file: Path | None = None
    run: str | None = None
    tokenizer: str | None = None
    decode: str | None = None
    chat: Path | None = None
    tools: Path | None = None
    effort: str | None = None
    thinking: bool = True
    wording: Path | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(TokenizeFlags, args, TokenizeFlags(), prog="perilune tokenize", description=__doc__ or "")
    if flags.run is not None and flags.tokenizer is not None:
        raise ConfigError(
            f"--run {flags.run} and --tokenizer {flags.tokenizer} both name a tokenizer; give one of them"
        )
    sources = {"a text": flags.text, "--file": flags.file, "--decode": flags.decode, "--chat": flags.chat}
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given; give one of them")
    options = {
        "--tools": flags.tools,
        "--effort": flags.effort,
        "--wording": flags.wording,
        "--no-thinking": not flags.thinking,
    }
    alone = [name for name, value in options.items() if value]
    if alone and flags.chat is None:
        verb = "needs" if len(alone) == 1 else "need"
        raise ConfigError(f"{' and '.join(alone)} {verb} --chat: the conversation that becomes a prompt")
    tokenizer, source = _tokenizer(flags)
    facts: dict[str, Any] = {"tokenizer": source, "vocab_size": tokenizer.vocab_size}
    if flags.decode is not None:
        ids = _ids(sys.stdin.read() if flags.decode == "-" else flags.decode)
        text = tokenizer.decode(ids, skip_special=False)
        print(json.dumps(facts | {"tokens": len(ids), "ids": ids, "text": text}) if flags.json else text)
        return 0
    if flags.chat is not None:
        return _print_prompt(tokenizer, source, _prompt(tokenizer, flags), facts, as_json=flags.json)
    data = _input(flags)
    ids = tokenizer.encode_bytes(data)
    pieces = [tokenizer.piece(token_id) for token_id in ids]
    facts |= {"text_bytes": len(data), "tokens": len(ids), "ids": ids, "pieces": pieces}
    if flags.json:
        print(json.dumps(facts))
        return 0
    _print_ids(ids, pieces)
    rate = f", {len(data) / len(ids):.2f} bytes a token" if ids else ""
    print(f"{len(ids)} tokens of {len(data)} bytes{rate}; tokenizer {source}, {tokenizer.vocab_size} ids")
    return 0


def _prompt(tokenizer: Tokenizer, flags: TokenizeFlags) -> Rendered:
    assert flags.chat is not None, "only called with a conversation"
    request = _read_json(flags.chat)
    if isinstance(request, list):
        request = {"messages": request}
    if not isinstance(request, dict):
        raise RequestError(f"{flags.chat} holds a {type(request).__name__}; give a list of messages or a chat request")
    messages = request.get("messages", [])
    images, videos = media_sizes(messages, flags.chat.parent)
    effort = flags.effort if flags.effort is not None else request.get("reasoning_effort")
    return render(
        tokenizer,
        messages,
        tools=request.get("tools") if flags.tools is None else _read_json(flags.tools),
        thinking=flags.thinking and effort != "none",
        effort=None if effort == "none" else effort,
        tool_choice=request.get("tool_choice"),
        response_format=request.get("response_format"),
        images=images,
        videos=videos,
        wording=Wording() if flags.wording is None else load_wording(flags.wording),
    )


def _print_prompt(tokenizer: Tokenizer, source: str, prompt: Rendered, facts: dict[str, Any], *, as_json: bool) -> int:
    """The ids of a conversation, its pieces, and what they are; one line a message of the prompt."""
    pieces = [tokenizer.piece(token_id) for token_id in prompt.ids]
    learned = sum(prompt.loss_mask)
    if as_json:
        facts |= {"tokens": len(prompt.ids), "ids": prompt.ids, "pieces": pieces, "message_ends": prompt.message_ends}
        print(json.dumps(facts | {"loss_tokens": learned, "loss_mask": [int(written) for written in prompt.loss_mask]}))
        return 0
    ends = [i + 1 for i, token_id in enumerate(prompt.ids) if token_id == tokenizer.special.end_of_msg]
    for start, end in zip([0, *ends], [*ends, len(prompt.ids)]):
        if start < end:
            _print_ids(prompt.ids[start:end], pieces[start:end])
    print(
        f"{len(prompt.ids)} tokens, {len(prompt.message_ends)} messages that end at {prompt.message_ends}, "
        f"{learned} tokens written by the assistant; tokenizer {source}, {tokenizer.vocab_size} ids"
    )
    return 0


def _print_ids(ids: list[int], pieces: list[str]) -> None:
    print(" ".join(map(str, ids)))
    print("|".join(piece.replace("\n", "\\n").replace("\t", "\\t") for piece in pieces))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from None


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
