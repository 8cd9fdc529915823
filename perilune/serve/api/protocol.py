"""Requests as clients send them, checked by type, and turned into sampling parameters.

Field names are those of the OpenAI API, with the sampling extras that other servers share (`top_k`, `min_p`,
`stop_token_ids`). Unknown fields are ignored: clients send extras of their own. A known field that asks for something
this server does not do is refused, never dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from perilune.serve.request import FieldError, SamplingParams

T = TypeVar("T")


class StreamOptions(msgspec.Struct):
    """`include_usage`: send the token counts in a last chunk without choices."""

    include_usage: bool = False


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that chat and completion requests share; null means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Refused unless they ask for nothing.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def unsupported(self) -> list[tuple[str, bool]]:
        """(field, whether it asks for something that this server does not do)."""
        return [
            ("presence_penalty", bool(self.presence_penalty)),
            ("frequency_penalty", bool(self.frequency_penalty)),
            ("repetition_penalty", self.repetition_penalty not in (None, 1.0)),
            ("logit_bias", bool(self.logit_bias)),
        ]

    def token_limit(self) -> tuple[str, int | None]:
        """(field, most tokens of an answer) as the client wrote them."""
        return "max_tokens", self.max_tokens


class CompletionRequest(Sampling, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, whichever of the four forms was sent."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(entry) for entry in self.prompt}
        if len(kinds) != 1:
            problem = "is an empty list" if not kinds else "mixes strings, token ids and lists"
            raise FieldError(f"prompt {problem}; give a string, token ids, or a list of either", "prompt")
        return cast("Sequence[str | list[int]]", [self.prompt] if kinds == {int} else self.prompt)

    def unsupported(self) -> list[tuple[str, bool]]:
        """See `Sampling.unsupported`."""
        return [
            *Sampling.unsupported(self),
            ("echo", bool(self.echo)),
            ("suffix", bool(self.suffix)),
            ("best_of", self.best_of is not None and self.best_of != (self.n or 1)),
            ("logprobs", self.logprobs is not None),
        ]


_TYPE_ERROR = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode(body: bytes, kind: type[T]) -> T:
    """Read a request body.

    Raises:
        FieldError: not JSON, a missing field, or a field of the wrong type; `param` is the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _TYPE_ERROR.match(str(error))
        assert found is not None, str(error)
        path = (found["path"] or "").removeprefix("$").lstrip(".")
        missing = _MISSING.search(found["problem"])
        if missing:
            path = f"{path}.{missing[1]}".lstrip(".")
        raise FieldError(f"{path or 'the body'}: {found['problem'].strip()}", path or "", "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FieldError(f"the body is not valid JSON: {error}", "", "invalid_json") from None


def sampling_params(
    request: Sampling, *, context_length: int, default_max_tokens: int, max_choices: int
) -> SamplingParams:
    """Sampling parameters of a request.

    Raises:
        FieldError: a value out of range, or a field that asks for what this server does not do.
    """
    for name, asked in request.unsupported():
        if asked:
            raise FieldError(f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    field, limit = request.token_limit()
    if limit is not None and not 1 <= limit <= context_length:
        raise FieldError(f"{field}={limit} must be a whole number in 1..{context_length}", field)
    if request.n is not None and not 1 <= request.n <= max_choices:
        raise FieldError(f"n={request.n} must be a whole number in 1..{max_choices}", "n")
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == -1 else request.top_k,  # some clients write "all" as -1
        "min_p": request.min_p,
        "seed": request.seed,
        "max_tokens": limit,
        "stop": (request.stop,)
        if isinstance(request.stop, str)
        else None
        if request.stop is None
        else tuple(request.stop),
        "stop_ids": None if request.stop_token_ids is None else tuple(request.stop_token_ids),
    }
    chosen = {"max_tokens": default_max_tokens} | {key: value for key, value in given.items() if value is not None}
    try:
        return SamplingParams(**chosen)
    except FieldError as error:
        raise FieldError(
            str(error), "stop_token_ids" if error.param == "stop_ids" else error.param, error.code
        ) from None
