"""Requests as clients send them, checked by type, and turned into sampling parameters.

Field names are those of the OpenAI API, with the extras that other servers share. An unknown field is ignored, with one
line in the log: clients send extras of their own. A known field that asks for something this server does not do is
refused, never dropped in silence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from perilune.serve.request import FieldError, SamplingParams, Service, Structured

log = logging.getLogger(__name__)

T = TypeVar("T")

_SALT_CHARS = 256


class StreamOptions(msgspec.Struct):
    """When token counts are streamed: in a last chunk without choices, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(msgspec.Struct):
    """Exactly one form of the answer."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def form(self) -> Structured | None:
        """The form that is asked for; FieldError for several."""
        given = {kind: value for kind in ("json", "regex", "choice", "grammar") if (value := getattr(self, kind)) is not None}  # fmt: skip
        if len(given) > 1:
            raise FieldError(f"structured_outputs has {', '.join(given)}; give one of them", "structured_outputs")
        for kind, value in given.items():
            return Structured(kind, _schema(value) if kind == "json" else value)  # type: ignore[arg-type]
        return None


def _schema(value: Any) -> Any:
    """A JSON schema, which some clients send as text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        raise FieldError("structured_outputs.json is no JSON; give a schema", "structured_outputs") from None


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that chat and completion requests share; null means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    priority: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None

    def unsupported(self) -> list[tuple[str, bool]]:
        """(field, whether it asks for something that this server does not do)."""
        return []

    def token_limit(self) -> tuple[str, int | None]:
        """(field, most tokens of an answer) as the client wrote them."""
        return "max_tokens", self.max_tokens

    def alternatives(self) -> int | None:
        """Likely tokens that are shown with each drawn one; None = no log-probabilities."""
        return None

    def form(self) -> Structured | None:
        """The form of the answer."""
        return None if self.structured_outputs is None else self.structured_outputs.form()

    def service(self, request_id: str) -> Service:
        """How the request is treated."""
        salt, session = self.cache_salt or "", self.session_id
        for name, value in (("cache_salt", salt), ("session_id", session or "")):
            if len(value) > _SALT_CHARS:
                raise FieldError(f"{name} has {len(value)} characters; at most {_SALT_CHARS} are allowed", name)
        return Service(priority=self.priority or 0, session_id=session, cache_salt=salt, request_id=request_id)


class CompletionRequest(Sampling, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None

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
            ("suffix", bool(self.suffix)),
            ("best_of", self.best_of is not None and self.best_of != (self.n or 1)),
        ]

    def alternatives(self) -> int | None:
        """See `Sampling.alternatives`."""
        return self.logprobs

    def form(self) -> Structured | None:
        """See `Sampling.form`; a `response_format` says the same in other words."""
        form, other = Sampling.form(self), self.response_format
        if other is None or other.get("type") == "text":
            return form
        if form is not None:
            raise FieldError("structured_outputs and response_format exclude each other", "response_format")
        if other.get("type") == "json_object":
            return Structured("json", {"type": "object"})
        schema = other.get("json_schema")
        if other.get("type") != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
            raise FieldError(
                'response_format must be {"type": "text"}, {"type": "json_object"}, or '
                '{"type": "json_schema", "json_schema": {"schema": …}}',
                "response_format",
            )
        return Structured("json", schema["schema"])


_TYPE_ERROR = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode(body: bytes, kind: type[T]) -> T:
    """Read a request body.

    Raises:
        FieldError: not JSON, a missing field, or a field of the wrong type; `param` is the field.
    """
    try:
        value = msgspec.json.decode(body, type=kind)
        _note_unknown(body, kind)
        return value
    except msgspec.ValidationError as error:
        found = _TYPE_ERROR.match(str(error))
        assert found is not None, str(error)
        path = (found["path"] or "").removeprefix("$").lstrip(".")
        missing = _MISSING.search(found["problem"])
        if missing:
            path = f"{path}.{missing[1]}".lstrip(".")
        raise FieldError(f"{path or 'the body'}: {found['problem'].strip()}", path or "", "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {error}", "", "invalid_json") from None


_noted: set[str] = set()


def _note_unknown(body: bytes, kind: type) -> None:
    """Log names of ignored fields, each once; names are the client's, so only so many are remembered."""
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(kind.__struct_fields__)
    for name in sorted(names - _noted):
        if len(_noted) < 100:
            _noted.add(name)
            log.warning("requests have the field %.80r, which this server does not know; it is ignored", name)


def sampling_params(
    request: Sampling, *, context_length: int, default_max_tokens: int, max_choices: int, most_tokens: int | None = None
) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        request: as sent.
        context_length: a larger `max_tokens` means the same as this one.
        default_max_tokens: of a request that does not say.
        max_choices: largest `n`.
        most_tokens: of any answer, whatever the request says; None = as many as fit.

    Raises:
        FieldError: a value out of range, or a field that asks for what this server does not do.
    """
    for name, asked in request.unsupported():
        if asked:
            raise FieldError(f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    field, limit = request.token_limit()
    if limit is not None and limit < 1:
        raise FieldError(f"{field}={limit} must be a whole number of at least 1", field)
    if request.n is not None and not 1 <= request.n <= max_choices:
        raise FieldError(f"n={request.n} must be a whole number in 1..{max_choices}", "n")
    longest = min(context_length, most_tokens or context_length)
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == -1 else request.top_k,  # some clients write "all" as -1
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": None if request.logit_bias is None else _biases(request.logit_bias),
        "seed": request.seed,
        "max_tokens": min(limit or default_max_tokens, longest),
        "min_tokens": request.min_tokens if most_tokens is None else min(request.min_tokens or 0, most_tokens),
        "ignore_eos": request.ignore_eos,
        "stop": _stops(request.stop),
        "include_stop": request.include_stop_str_in_output,
        "stop_ids": None if request.stop_token_ids is None else tuple(request.stop_token_ids),
        "logprobs": request.alternatives(),
        "prompt_logprobs": request.prompt_logprobs,
        "structured": request.form(),
    }
    try:
        return SamplingParams(**{key: value for key, value in given.items() if value is not None})
    except FieldError as error:
        names = {"stop_ids": "stop_token_ids", "max_tokens": field, "logprobs": request_logprobs_field(request)}
        raise FieldError(str(error), names.get(error.param, error.param), error.code) from None


def request_logprobs_field(request: Sampling) -> str:
    """Name of the field that says how many alternatives are shown."""
    return "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"


def _stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id in biases:
        if not token_id.isascii() or not token_id.isdigit() or len(token_id) > 10:
            raise FieldError(f"logit_bias has the key {token_id[:40]!r}; keys are token ids", "logit_bias")
    return tuple((int(token_id), value) for token_id, value in biases.items())
